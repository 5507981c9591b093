"""Hardware by name: published figures, their sources, and what is assumed where nothing is published."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from plait.core_ir.errors import UsageError
from plait.core_ir.hardware import Hardware, Link

# Matrix products on data-centre GPUs reach 80-90% of the peak once they are large (Shah et al., FlashAttention-3, arXiv
# 2407.08608, section 1; Dao, FlashAttention-2, arXiv 2307.08691, says the same of A100): the lower end, for all shapes.
_GPU_EFFICIENCY = 0.8

# What a ring step takes with the simple protocol in the tuning model of NCCL (src/graph/tuning.cc, `hwLat`).
_NVLINK_LATENCY_US = 3.4
_NETWORK_LATENCY_US = 9.6

_DENSE = "Peaks without sparsity, f32 without TF32; 80% of them for every product, small ones too."

CPU_CORE = Hardware(
    name="cpu-core",
    # One core with vector instructions, about: nothing published, and the model's default.
    flops_per_second={"f32": 2e10},
    bytes_per_second=1e10,
    memory_bytes=4 * 2**30,
    # A message inside the machine is a copy, read and written; from machine to machine, 10 Gbit Ethernet.
    inside=Link(5e9, 20.0),
    between=Link(1.25e9, 50.0),
    ranks_per_node=8,
    assumptions="Round numbers for one core of a server.",
)

A100 = Hardware(
    name="a100",
    # NVIDIA A100 datasheet, SXM, 80 GB; f64 by tensor cores.
    flops_per_second={"f64": 19.5e12, "f32": 19.5e12, "bf16": 312e12, "f16": 312e12},
    bytes_per_second=2.039e12,
    memory_bytes=80e9,
    # NVLink 600 GB/s, half of it each way; a DGX A100 has eight GPUs and a 200 Gbit/s adapter for each.
    inside=Link(300e9, _NVLINK_LATENCY_US),
    between=Link(25e9, _NETWORK_LATENCY_US),
    ranks_per_node=8,
    product_efficiency=_GPU_EFFICIENCY,
    sms=108,
    assumptions=_DENSE,
)

_HOPPER = {"f32": 66.9e12, "bf16": 989.4e12, "f16": 989.4e12, "f8": 1978.9e12}

H100 = Hardware(
    name="h100",
    # NVIDIA H100 datasheet, SXM5, and the Hopper architecture white paper; f64 by tensor cores.
    flops_per_second={"f64": 66.9e12, **_HOPPER},
    bytes_per_second=3.35e12,
    memory_bytes=80e9,
    # NVLink 900 GB/s, half of it each way; a DGX H100 has eight GPUs and a 400 Gbit/s adapter for each.
    inside=Link(450e9, _NVLINK_LATENCY_US),
    between=Link(50e9, _NETWORK_LATENCY_US),
    ranks_per_node=8,
    product_efficiency=_GPU_EFFICIENCY,
    sms=132,
    assumptions=_DENSE,
)

H200 = Hardware(
    name="h200",
    # NVIDIA H200 datasheet, SXM: an H100 with more and faster memory.
    flops_per_second=H100.flops_per_second,
    bytes_per_second=4.8e12,
    memory_bytes=141e9,
    inside=H100.inside,
    between=H100.between,
    ranks_per_node=8,
    product_efficiency=_GPU_EFFICIENCY,
    sms=132,
    assumptions=_DENSE,
)

H800 = Hardware(
    name="h800",
    # An H100 with slower links, and 1 Tflop/s in f64. Links, node and units for communication are those of the cluster
    # of DeepSeek-V3 (arXiv 2412.19437, sections 3.1, 3.2.2 and 3.5.1): NVLink 160 GB/s, InfiniBand 50 GB/s, eight to a
    # node, 20 of the 132 SMs for communication.
    flops_per_second={"f64": 1e12, **_HOPPER},
    bytes_per_second=3.35e12,
    memory_bytes=80e9,
    inside=Link(160e9, _NVLINK_LATENCY_US),
    between=Link(50e9, _NETWORK_LATENCY_US),
    ranks_per_node=8,
    product_efficiency=_GPU_EFFICIENCY,
    sms=132,
    comm_sms=20,
    assumptions=_DENSE,
)

NAMED: Mapping[str, Hardware] = MappingProxyType(
    {hardware.name: hardware for hardware in (CPU_CORE, A100, H100, H200, H800)}
)


_OF_DEVICES: Mapping[str, Hardware] = MappingProxyType(
    {
        "A100": A100,
        "A800": A100,  # one whose NVLink is slower, by a third
        "H100": H100,
        "GH200": H100,  # one with more memory, beside a CPU
        "H200": H200,
        "H800": H800,
    }
)
"""By the word of a device's name that says its model, whatever its form and memory: the figures are those of SXM."""

UNKNOWN_DEVICE = H100
"""What a device that nothing is known of is taken for."""

logger = logging.getLogger(__name__)


def hardware_of_device(name: str | None) -> Hardware:
    """What a device is taken for by the name that its driver gives, as "NVIDIA H100 80GB HBM3"; None: a core of a CPU.

    A device that is not listed is taken for an H100, and a warning is logged that says so: on anything like a GPU that
    is nearer than a CPU's core, but for figures to go by it has to be described.
    """
    if name is None:
        return CPU_CORE
    for word in re.split(r"[^A-Z0-9]+", name.upper()):
        if word in _OF_DEVICES:
            return _OF_DEVICES[word]
    logger.warning(
        "there are no figures for %r: the cost model takes it for %s; hardware= says what it is",
        *(name, UNKNOWN_DEVICE.name),
    )
    return UNKNOWN_DEVICE


def find_hardware(name: str | os.PathLike[str]) -> Hardware:
    """The hardware of a name, or of a .json or .toml file; UsageError, listing what there is, for neither."""
    name = os.fspath(name)
    if name in NAMED:
        return NAMED[name]
    if Path(name).suffix.lower() in (".json", ".toml"):
        return Hardware.from_file(name)
    raise UsageError(
        f"unknown hardware {name!r}; there are: {', '.join(NAMED)}; or name a .json or .toml file of your own"
    )
