"""Timelines on their way from a worker to the page."""

import json
import re

import numpy as np
import pytest

import plait
from plait.compare.run import Results
from plait.compare.timelines import decode, encode, render_page
from plait.core_ir.errors import UsageError
from plait.core_ir.schedule.timeline import Timeline

EDGES = [(0, 1, "activation"), (1, 0, "gradient")]


@pytest.mark.parametrize("transfer", [0.0, {(0, 1): 0.25, (1, 0): 0.5}])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_both_timelines_come_back(name, transfer) -> None:
    schedule = plait.schedule(name, 2, 3)
    times = plait.Times(f=[1.0, 2.0], i=1.5, w=0.5, comm=0.125, transfer=transfer)
    simulated = schedule.simulate(times, edges=EDGES)
    measured = Timeline(schedule, 1.1 * simulated.start, 1.1 * simulated.end)
    found = decode(json.loads(json.dumps(encode(measured, simulated))))
    for got, sent in zip(found, (measured, simulated), strict=True):
        assert got.schedule == schedule
        assert got.schedule.name == name
        np.testing.assert_array_equal(got.start, sent.start)
        np.testing.assert_array_equal(got.end, sent.end)
    assert found[0].transfers is None
    assert found[1].transfers is not None
    np.testing.assert_array_equal(found[1].transfers.arrival, simulated.transfers.arrival)


def test_a_page_is_in_milliseconds() -> None:
    times = plait.Times(f=[1e-3, 2e-3], i=1.5e-3, w=0.5e-3, comm={(0, 1): 5e-4, (1, 0): 5e-4})
    simulated = plait.schedule("1f1b", 2, 2).simulate(times, edges=EDGES)
    page = render_page([("simulated", simulated)])
    data = json.loads(re.search(r"const DATA = (\{.*?\});\n", page)[1])
    (panel,) = data["panels"]
    assert data["unit"] == "ms"
    assert panel["end"] == pytest.approx(1e3 * simulated.makespan)
    assert panel["tasks"][0][:3] == [0, 0.0, 1.0]
    assert panel["messages"][0][:3] == pytest.approx([0, 1.0, 1.5])
    assert f"makespan {1e3 * simulated.makespan:g} ms" in page


def test_the_page_has_a_panel_for_each_and_one_that_cannot_be_written_is_misuse(tmp_path) -> None:
    timeline = plait.schedule("1f1b", 2, 2).simulate(plait.Times(f=1, i=1, w=1))
    results = Results(timelines=[("a <row>: measured", timeline), ("simulated", timeline)])
    results.write_timelines(tmp_path / "new" / "page.html")
    page = (tmp_path / "new" / "page.html").read_text()
    assert page.count("<canvas") == 2
    assert "a &lt;row&gt;: measured" in page
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        results.write_timelines(tmp_path / "file" / "page.html")
