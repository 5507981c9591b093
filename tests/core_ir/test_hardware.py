"""Descriptions of hardware: what they refuse, what they say of dtypes and links, files."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core_ir.errors import UsageError
from plait.core_ir.hardware import Hardware, Link, describe, to_json
from plait.core_ir.named_hardware import (
    CPU_CORE,
    H100,
    H800,
    NAMED,
    find_hardware,
    hardware_of_device,
)
from plait.core_ir.types import DTYPES, bf16, c64, c128, f8e5m2, f16, f32, f64, i32

PLAIN = Hardware(
    name="plain",
    flops_per_second={"f32": 8.0},
    bytes_per_second=4.0,
    memory_bytes=100,
    inside=Link(2.0),
    between=Link(1.0, 3.0),
    ranks_per_node=2,
)

FILE = """
name = "mine"
bytes_per_second = 4e12
memory_bytes = 141e9
ranks_per_node = 8
sms = 132
comm_sms = 20
inside = { bytes_per_second = 450e9, latency_us = 3 }

[flops_per_second]
f32 = 67e12
bf16 = 989e12

[between]
bytes_per_second = 50e9
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops_per_second": {"bf16": 1.0}}, r"must have f32, .* it has bf16"),
        ({"flops_per_second": {"f32": 1.0, "tf32": 2.0}}, r"no dtype 'tf32'; there are: f8, bool"),
        ({"flops_per_second": {"f32": -1.0}}, r"flops_per_second\['f32'\] must be above 0, got -1"),
        ({"flops_per_second": 5.0}, r"must be a number for each of some dtypes, got 5.0"),
        ({"bytes_per_second": 0}, r"Hardware.bytes_per_second must be above 0, got 0"),
        ({"memory_bytes": float("inf")}, r"Hardware.memory_bytes must be finite, got inf"),
        ({"inside": 5.0}, r"Hardware.inside must be a Link, got 5.0"),
        ({"ranks_per_node": 0}, r"ranks_per_node must be a whole number, 1 or more, got 0"),
        ({"sms": 1.5}, r"sms must be a whole number, 1 or more, got 1.5"),
        ({"sms": 20, "comm_sms": 20}, r"comm_sms must be .* below sms \(20\), got 20"),
        ({"product_efficiency": 1.2}, r"product_efficiency must be in \(0, 1\], got 1.2"),
        ({"name": ""}, r"Hardware.name must be a name, got ''"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(PLAIN, **changes)  # type: ignore[arg-type]


def test_links_are_checked() -> None:
    with pytest.raises(UsageError, match=r"Link.bytes_per_second must be above 0, got 0"):
        Link(0)
    with pytest.raises(UsageError, match=r"Link.latency_us must be a number, 0 or more, got -1"):
        Link(1, -1)


def test_dtypes_without_a_figure_go_by_others() -> None:
    assert [PLAIN.peak(d) for d in (f32, bf16, f8e5m2, i32)] == [8.0] * 4
    assert [PLAIN.peak(d) for d in (f64, c64, c128)] == [4.0, 2.0, 1.0]
    full = replace(PLAIN, flops_per_second={"f32": 8, "bf16": 64, "f64": 2, "f8": 128})
    assert [full.peak(d) for d in (bf16, f16, f8e5m2, f64, c128)] == [64, 64, 128, 2, 0.5]
    assert all(hardware.peak(d) > 0 for hardware in NAMED.values() for d in DTYPES.values())


def test_ranks_fill_nodes_in_their_order() -> None:
    assert PLAIN.link(0, 1) is PLAIN.link(3, 2) is PLAIN.inside
    assert PLAIN.link(1, 2) is PLAIN.link(3, 0) is PLAIN.between
    assert PLAIN.inside.seconds(6) == 3.0
    assert PLAIN.between.seconds(6) == pytest.approx(6 + 3e-6)


def test_units_that_communicate_slow_computing() -> None:
    assert PLAIN.slowdown == H100.slowdown == 1.0
    assert H800.slowdown == 132 / 112


def test_published_ratios() -> None:
    # DeepSeek-V3, arXiv 2412.19437, section 3.2.2: NVLink has roughly 3.2 times the bandwidth of InfiniBand.
    assert H800.inside.bytes_per_second / H800.between.bytes_per_second == 3.2
    assert H100.peak(bf16) == pytest.approx(2 * 494.7e12)  # twice TF32
    assert H100.peak(f8e5m2) == pytest.approx(2 * H100.peak(f16), rel=1e-3)


def test_a_file_says_all_there_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    mine = find_hardware(str(path))
    assert (mine.name, mine.peak(bf16), mine.slowdown) == ("mine", 989e12, 132 / 112)
    assert (mine.inside, mine.between) == (Link(450e9, 3), Link(50e9))
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(to_json(mine)))
    assert Hardware.from_file(copy) == mine


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes = 141e9", "", r"mine.toml: key 'memory_bytes' is missing"),
        ("name =", "title =", r"mine.toml: unknown key 'title'; there are: name, flops_per_second"),
        (
            "latency_us",
            "latency",
            r"mine.toml: inside: unknown key 'latency'; there are: bytes_per",
        ),
        ("bytes_per_second = 50e9", "", r"mine.toml: between: key 'bytes_per_second' is missing"),
        ("450e9", "-1", r"mine.toml: inside: Link.bytes_per_second must be above 0, got -1"),
        ("comm_sms = 20", "comm_sms = 132", r"mine.toml: Hardware.comm_sms must be .* got 132"),
        (
            "f32 = 67e12",
            "f31 = 1",
            r"mine.toml: Hardware.flops_per_second: there is no dtype 'f31'",
        ),
        ("sms = 132", "sms = ", r"mine.toml is not TOML: "),
        ("[between]", "[unused]", r"mine.toml: unknown key 'unused'"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        Hardware.from_file(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*gone.json: No such file"):
        Hardware.from_file(tmp_path / "gone.json")
    with pytest.raises(UsageError, match=r"is read from a .json or .toml file"):
        Hardware.from_file(tmp_path / "mine.yaml")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match=r"list.json: expected a table of keys, got \[\]"):
        Hardware.from_file(tmp_path / "list.json")
    with pytest.raises(UsageError, match=r"unknown hardware 'tpu'; there are: cpu-core, a100"):
        find_hardware("tpu")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("A100-SXM4-40GB", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100"),
        ("NVIDIA GH200 480GB", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA H800", "h800"),
    ],
)
def test_a_device_is_known_by_a_word_of_its_name(
    device: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert hardware_of_device(device) is NAMED[name]
    assert hardware_of_device(None) is CPU_CORE
    assert not caplog.records


@pytest.mark.parametrize(
    "device", ["NVIDIA A10", "NVIDIA L40S", "NVIDIA H20", "Tesla V100-SXM2-16GB", "H100X"]
)
def test_an_unknown_device_is_taken_for_an_h100_and_said_so(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "plait"):
        assert hardware_of_device(device) is H100
    (record,) = caplog.records
    assert record.getMessage() == (
        f"there are no figures for {device!r}: the cost model takes it for h100; hardware= says what it is"
    )


def test_words_hold_the_figures() -> None:
    text = describe(H800)
    for figure in ("bf16 989.4 Tflop/s", "160 GB/s", "50 GB/s", "20 of 132", "1.18 times", "80%"):
        assert figure in text
