"""Errors a user can act on: said in one sentence, shown without a traceback."""


class UserError(Exception):
    """Something given by the user cannot be used; the message says what was given and what to write instead.

    >>> raise UserError("reviews.csv has no column 'text'; its columns are: review, stars. Write --text review")
    """


class RunError(Exception):
    """Something went wrong that the user did not cause (a full disk, a broken download)."""
