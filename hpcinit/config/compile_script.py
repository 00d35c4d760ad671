"""Compiles a script without running it, also as `python -I -S compile_script.py SCRIPT` in any Python 3."""

import sys
import warnings


def syntax_error(path: str) -> str:
    """Return 'line 3: invalid syntax' for a script that this Python cannot compile, else ''. Raise OSError."""
    with open(path, "rb") as file:  # noqa: PTH123 - the child needs no other import
        text = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except ValueError as error:  # a NUL character, in Python 3.11
        return str(error)
    return ""


if __name__ == "__main__":
    print(syntax_error(sys.argv[1]))
