"""A caller's errors: which argument, what was got and what is allowed."""


def invalid(argument: str, got: object, allowed: object) -> ValueError:
    return ValueError(_message(argument, got, allowed))


def mistyped(argument: str, got: object, allowed: object) -> TypeError:
    """Where an argument is an object of another kind."""
    return TypeError(_message(argument, got, allowed))


def _message(argument: str, got: object, allowed: object) -> str:
    return f"{argument}: got {got}; allowed: {allowed}"
