"""`InputError`, the error for all invalid input."""


class InputError(ValueError):
    """Invalid input to worldtokens: a file, a row, a setting.

    The message names the file or row, the value found, the value expected, and the remedy. Readers and collators raise no
    other error for bad input, so that a data loop may catch this class alone.
    """
