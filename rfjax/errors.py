"""The one exception that bad input raises.

Everything a user can get wrong (a size, a prompt, a file, a mesh) ends as an `InputError` whose message is one
line: it names the value and the fix. The CLI prints that line and exits with code 2.
"""


class InputError(ValueError):
    """Bad input from the user; the message names the value and what to do instead."""
