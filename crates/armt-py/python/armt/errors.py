"""What can go wrong, in the words of the command line: every error is an ``armt.Error``, and what Python has a class for is of that too."""


class Error(Exception):
    """A model, its files or its texts refused or failed."""


class InputError(Error, ValueError):
    """An argument or a key of a recipe does not fit; the text says what was expected and what came."""


class MemoryFileError(Error, ValueError):
    """Bytes that are no memory, damaged, or the memory of another model."""


class FileError(Error, OSError):
    """A file could not be read or written, or does not hold what it should."""


class NotFoundError(FileError, FileNotFoundError):
    """There is no such file, folder, model or recipe."""
