"""Functions that the callbacks share. The name of the module has the spelling of torch's, so that imports work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...base_data_sparsifier import SUPPORTED_TYPES, BaseDataSparsifier, flat_names

logger: logging.Logger = logging.getLogger(__name__)


def _attach_model_to_data_sparsifier(
    module: nn.Module, data_sparsifier: BaseDataSparsifier, config: Mapping[str, Any] | None = None
) -> None:
    """Adds every parameter of the module to the sparsifier, replacing data of the same names."""
    names = _names(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Replacing the data named")  # expected after each epoch
        for name, parameter in module.named_parameters():
            if name in names:
                data_sparsifier.add_data(name=names[name], data=parameter, **(config or {}).get(names[name], {}))


def _get_valid_name(name: str) -> str:
    return name.replace(".", "_")


def _names(module: nn.Module) -> dict[str, str]:
    """Returns the sparsifier's names of the parameters that can be sparsified."""
    return flat_names(name for name, parameter in module.named_parameters() if type(parameter) in SUPPORTED_TYPES)


def _log_sparsified_level(model: nn.Module, data_sparsifier: BaseDataSparsifier) -> None:
    """Logs the masked fraction of each parameter."""
    for name, short in _names(model).items():
        pruned = 1 - data_sparsifier.get_mask(short).float().mean().item()
        logger.info("Sparsity in layer %s = %.2f%%", name, 100 * pruned)
