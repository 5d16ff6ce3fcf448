"""tpformer's version.

Belongs here: the number alone, so that the lowest layer can name it without the package's face, `tpformer/__init__.py`.
"""

__version__ = "0.1.0"
