"""Files of a folder that somebody else has made. What they name must lie in that folder. Nothing else belongs here."""

from pathlib import Path

from tpformer.words import printable


def inside(folder: Path, name: str) -> Path:
    """folder / name, which need not exist. ValueError for a name or a link that leads out of the folder.

    Links into the blobs of the folder's own Hugging Face cache are followed: there a snapshot is made of them.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or len(name) > 255:
        raise ValueError(f"{printable(folder)} names the file {printable(name, 80)}, which cannot lie in it: leave it")
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # links in a circle, which are no file
        return path
    cache = root.parent.parent / "blobs"
    if target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(cache)):
        return path
    raise ValueError(
        f"{printable(path)} is a link to {printable(target)}, outside of its folder: if that is meant, put a copy in "
        f"its place"
    )
