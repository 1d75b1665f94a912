"""Files on the Hugging Face Hub, named `hf://datasets/OWNER/NAME/PATH`, or `.../NAME@REVISION/PATH`."""

from __future__ import annotations

import re
from pathlib import Path

from ngym.errors import UsageError

HUB = "hf:/"  # the beginning of every such path, also as the text of a Path
# a Path has one slash where the text had two
FORM = re.compile(r"hf:/{1,2}datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?/(?P<file>.+)")


def local_copy(path: Path) -> Path:
    """The downloaded file of an `hf://` path, in the cache of huggingface_hub.

    HF_ENDPOINT, HF_TOKEN and HF_HOME apply, as in other programs.

    Raises:
        UsageError: the path has another form, or the file cannot be downloaded.
    """
    shown = "hf://" + path.as_posix().removeprefix("hf:").lstrip("/")
    match = FORM.fullmatch(path.as_posix())
    if match is None:
        raise UsageError(f"{shown}: not of the form hf://datasets/OWNER/NAME/PATH (or .../NAME@REVISION/PATH)")
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(match["name"], match["file"], repo_type="dataset", revision=match["revision"])
    except hub_errors() as error:
        raise UsageError(f"{shown}: cannot be downloaded: {first_line(error)}") from None
    return Path(found)


def hub_errors() -> tuple[type[Exception], ...]:
    """What calls of huggingface_hub raise: its own errors, and those of the HTTP client that it uses."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    of_client = [kind for kind in HfHubHTTPError.__bases__ if issubclass(kind, Exception)]
    return (EntryNotFoundError, HFValidationError, RuntimeError, OSError, *of_client)


def first_line(error: Exception) -> str:
    """The lines of an error of huggingface_hub as one; a blank line ends what concerns the user."""
    return " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
