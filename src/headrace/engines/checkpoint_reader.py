"""Weights of a saved model, for an engine that computes with others of the same shape.

In: a manifest whose location is a directory in Hugging Face format. Out: its tensors as they lie in memory, in the
engine's own precision. Nothing is changed by reading: the engine checks names, shapes and types before it takes any.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.errors import ModelError, WeightSyncError
from headrace.models.loading import load_model
from headrace.models.tensors import to_blobs
from headrace.types import TensorBlob, WeightManifest


class CheckpointReader:
    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        try:
            return to_blobs(load_model(manifest.location, dtype=self._dtype))
        except ModelError as error:
            raise WeightSyncError(str(error)) from error
        except Exception as error:
            # Readers of damaged files raise all kinds of errors, none of which is this engine's.
            raise WeightSyncError(
                f"{manifest.location} cannot be read ({type(error).__name__}: {error}); write it again"
            ) from error

    def close(self) -> None: ...
