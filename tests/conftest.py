"""`--update-golden`: rewrite expected texts; review them in the diff."""

import sys
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_group_of_another_module() -> None:
    """A model that was captured over a mesh may have left a process group behind."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
