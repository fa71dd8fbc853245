"""Write RUN/mismatch/000012.zarr.zip: the mismatch statistics of step 12, a zipped Zarr v3 group of small arrays.

    statistics  float64 [updates, groups, statistics]  ESS, KL estimates, gaps, …; NaN without tokens
    sums        float64 [updates, groups, sums]        the sums behind them; add up over updates and steps
    histogram   float64 [updates, groups, bins]        tokens by log-ratio
    quantiles   float64 [updates, groups, quantiles]   of the log-ratios, exact; NaN without tokens
    sequences   float64 [samples, columns]             one row for each sample of batch 12, in its order; an episode
                                                       of several turns is one sample, with its sampled tokens
    update      int32   [samples]                      the optimizer step that saw the sample; -1 for none

The group's attributes name the places of every axis but `updates` and `samples`: groups, statistics, sums,
histogram_edges, quantiles, sequence_columns. The file is readable without Even Keel:

    group = zarr.open_group(zarr.storage.ZipStore("000012.zarr.zip", mode="r"), mode="r")
    group["quantiles"][0, group.attrs["groups"].index("age/0")]

A step trained again after a resume replaces its file. No process takes a decision from these files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.files import replacing
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.data.zarr_zip import write_zarr_zip
from precision.mismatch.statistics import GROUPS, QUANTILES, SEQUENCE_COLUMNS, Mismatch
from precision.ratios import LOG_RATIO_EDGES, SUMS

SCHEMA_VERSION = 1


def write_mismatch(run: RunDirectory, step: int, mismatch: Mismatch) -> None:
    """Write the file of `step`, durably, atomically and under the fence."""
    names, statistics = mismatch.table()
    attributes: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "groups": list(GROUPS),
        "statistics": list(names),
        "sums": list(SUMS),
        "histogram_edges": list(LOG_RATIO_EDGES),
        "quantiles": list(QUANTILES),
        "sequence_columns": list(SEQUENCE_COLUMNS),
    }
    arrays: dict[str, NDArray[np.generic]] = {
        "statistics": statistics,
        "sums": mismatch.sums,
        "histogram": mismatch.histogram,
        "quantiles": mismatch.quantiles,
        "sequences": mismatch.sequences,
        "update": mismatch.update,
    }
    run.fence()
    with replacing(run.mismatch / f"{numbered(step)}.zarr.zip") as file:
        write_zarr_zip(file, attributes, arrays)
