"""Where a dataset's documents end: what its .idx says, beside the id that a run takes for the end. Nothing else."""

import numpy as np

from .indexed import IndexedDataset

_LOOKED_AT = 1000  # boundaries of a dataset: each is a page of its .bin


def check_ends(dataset: IndexedDataset, end_of_document: int) -> None:
    """ValueError unless the id stands where the .idx has one document end and the next begin.

    Of many boundaries 1,000 are looked at, evenly spread. In a dataset of one document there is none.
    """
    index = dataset.index
    between = index.documents[1:-1]  # the first sequence of each document but the first
    between = between[np.linspace(0, len(between) - 1, min(_LOOKED_AT, len(between))).astype(np.int64)]
    starts = index.pointers[between[between < len(index.pointers)]] // index.dtype.itemsize
    for start in starts[starts > 0].tolist():  # nothing is before documents without tokens
        (last,) = dataset.tokens(start - 1, start).tolist()
        last = last if last >= 0 else ~last  # one that is no target
        if last != end_of_document:
            raise ValueError(
                f"data.separate_documents = true, but {dataset.bin_path} has a document that ends at token {start - 1} "
                f"with the id {last} and not with {end_of_document}, so that the next one could not be told from it: "
                f"build the dataset with an end of each document (Megatron's --append-eod), or set "
                f"data.end_of_document"
            )
