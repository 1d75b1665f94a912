"""Files on the Hugging Face Hub, named `hf://datasets/OWNER/NAME/PATH`, or `.../NAME@REVISION/PATH`, and its models."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from ngym.errors import UsageError

HUB = "hf:/"  # the beginning of every such path, also as the text of a Path
# a Path has one slash where the text had two
CONNECT_S = 3.0  # one attempt to reach the Hub; huggingface_hub itself takes 25 s for each missing file
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in a URL
FORM = re.compile(r"hf:/{1,2}datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?/(?P<file>.+)")


def local_copy(path: Path) -> Path:
    """The downloaded file of an `hf://` path, in the cache of huggingface_hub.

    HF_ENDPOINT, HF_TOKEN and HF_HOME apply, as in other programs.

    Raises:
        UsageError: the path has another form, or the file cannot be downloaded.
    """
    address = "hf://" + path.as_posix().removeprefix("hf:").lstrip("/")
    match = FORM.fullmatch(path.as_posix())
    if match is None:
        raise UsageError(f"{address}: not of the form hf://datasets/OWNER/NAME/PATH (or .../NAME@REVISION/PATH)")
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(match["name"], match["file"], repo_type="dataset", revision=match["revision"])
    except hub_errors() as error:
        raise UsageError(f"{address}: cannot be downloaded: {first_line(error)}") from None
    return Path(file)


def hub_model_problem(name: str) -> str | None:
    """The reason why this model or tokenizer cannot be loaded: the Hub cannot be reached, and its cache has no such
    model.

    Without the Hub, this process only uses the cache from then on, as with HF_HUB_OFFLINE=1. Call it before
    transformers or vLLM load the model.
    """
    if find_spec("huggingface_hub") is None:
        return None  # the import of transformers or vLLM, which need it, says what is missing
    from huggingface_hub import constants, try_to_load_from_cache

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if reason is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"  # of child processes
    constants.HF_HUB_OFFLINE = True  # the variable was read when the module was imported
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer_config.json")):
        return None
    return (
        f"{name} is neither a folder nor in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} is not reached: {reason}"
    )


def _unreachable(url: str) -> str | None:
    """The reason why nothing answers there, or None. Any answer counts, also an error."""
    from huggingface_hub import get_session

    try:
        get_session().head(url, timeout=CONNECT_S)
    except hub_errors() as error:
        return first_line(error)
    return None


def hub_errors() -> tuple[type[Exception], ...]:
    """The exceptions of huggingface_hub: its own errors, and those of the HTTP client that it uses."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    of_client = [kind for kind in HfHubHTTPError.__bases__ if issubclass(kind, Exception)]
    # ValueError: an answer that is not JSON, a file name that the Hub refuses
    return (EntryNotFoundError, HFValidationError, RuntimeError, OSError, ValueError, *of_client)


def first_line(error: BaseException) -> str:
    """The lines of an error of huggingface_hub as one, without credentials in URLs; a blank line ends what concerns the
    user.
    """
    line = " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
    cause = error.__cause__
    return CREDENTIALS.sub("//", line if cause is None or str(cause) in line else f"{line}: {first_line(cause)}")
