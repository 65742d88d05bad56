"""The one error that a user's input may cause, and the line that it prints."""


class UserError(ValueError):
    """Bad input: a recipe, a file, a row, a tensor. Its message is one line that says where and what.

    Scripts turn it into that line on stderr and exit status 2; anything else is a fault of ours and
    keeps its traceback.
    """
