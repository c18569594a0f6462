"""The exception tree. A message has what was found, what was expected and what to do."""


class InfercError(Exception):
    """Anything that inferc reports to its user in one line; the command line exits with `exit_code`."""

    exit_code = 1


class ConfigError(InfercError):
    """An option or a model config that cannot be used."""

    exit_code = 2


class ExportError(InfercError):
    """The model cannot be captured as a graph."""

    exit_code = 2


class VerifyError(InfercError):
    """A Program is not what it must be after a pass, or numbers moved further than their budget."""


class UnsupportedError(InfercError):
    """A model, a node or an option that inferc knows of and refuses."""

    exit_code = 2


class ArtifactError(InfercError):
    """A file that was read is missing, damaged, or of another version."""

    exit_code = 2


class RequestError(InfercError):
    """The client's fault: HTTP 400, gRPC INVALID_ARGUMENT."""

    exit_code = 2


class ObjectiveError(InfercError):
    """A request's objective can not be met, now or ever: gRPC RESOURCE_EXHAUSTED, HTTP 429."""


class GenerationError(InfercError):
    """One request cannot go on: the model's numbers for it are broken, or the engine fails or dies of it."""
