"""The one error that a border of the package raises."""


class InputError(ValueError):
    """Something given to worldtokens cannot be used: a file, a row, a setting.

    The message names the file or row, what was found, what was expected, and the way out. Readers and
    collators raise nothing else for bad input, so that a data loop may catch this class alone.
    """
