"""What can go wrong, as a tree. Every message says what is wrong, where, and what to do, in one line.

SpecEdgeError
├── UsageError(ValueError)            an option or an argument out of range, an unknown name
├── PromptError(ValueError)           empty, or longer than the context
├── BundleError(ValueError)           a folder that is no bundle, or one that is damaged
│   └── BundleFileError(FileNotFoundError)   a file of it is missing
├── CheckpointError(ValueError)       a checkpoint that cannot be read
│   └── UnsupportedModelError         a family, feature or format there is no builder for
├── DownloadError(OSError)            a model that cannot be fetched
├── ExportError(RuntimeError)         the export did not come to an end; the old bundle stands
│   └── ParityError                   the written graph does not compute what the checkpoint says
├── StorageError(OSError)             no space, no permission, a name that exists
├── DeviceError(RuntimeError)         a provider or a version that is not there
├── MemoryBudgetError(MemoryError)    a model that does not fit into memory
├── NumericError(ArithmeticError)     the target gave NaN or infinity
└── MissingExtraError(ImportError)    a package of an optional extra is not installed
"""

from __future__ import annotations

__all__ = [
    "BundleError",
    "BundleFileError",
    "CheckpointError",
    "DeviceError",
    "DownloadError",
    "ExportError",
    "MemoryBudgetError",
    "MissingExtraError",
    "NumericError",
    "ParityError",
    "PromptError",
    "SpecEdgeError",
    "StorageError",
    "UnsupportedModelError",
    "UsageError",
]


class SpecEdgeError(Exception):
    """Base of every error that a user of SpecEdge can cause or meet."""


class UsageError(SpecEdgeError, ValueError):
    """An option or an argument is out of range or unknown."""


class PromptError(SpecEdgeError, ValueError):
    """A prompt that cannot be run: empty, or longer than the context."""


class BundleError(SpecEdgeError, ValueError):
    """A folder that is not a bundle, or one whose files are damaged."""


class BundleFileError(BundleError, FileNotFoundError):
    """A file that the bundle's manifest lists is missing."""


class CheckpointError(SpecEdgeError, ValueError):
    """A checkpoint that cannot be read."""


class UnsupportedModelError(CheckpointError):
    """A model family, feature or number format that no builder covers."""


class DownloadError(SpecEdgeError, OSError):
    """A model that cannot be fetched."""


class ExportError(SpecEdgeError, RuntimeError):
    """An export that did not come to an end; an earlier bundle stays whole."""


class ParityError(ExportError):
    """The written graph does not compute what the checkpoint says."""


class StorageError(SpecEdgeError, OSError):
    """No space, no permission, or a name that exists already."""


class DeviceError(SpecEdgeError, RuntimeError):
    """An execution provider, or a version of one, that is not there."""


class MemoryBudgetError(SpecEdgeError, MemoryError):
    """A model that does not fit into what memory is free, or allowed."""


class NumericError(SpecEdgeError, ArithmeticError):
    """The target model computed NaN or infinity."""


class MissingExtraError(SpecEdgeError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'specedge[{extra}]'")
