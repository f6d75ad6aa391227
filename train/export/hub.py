"""Uploads an export to the hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from decode.artifact import verify_directory
from decode.errors import UserError
from train.export.write import check_export


def push(directory: Path, repository: str) -> str:
    """Check an export, upload it to a model repository, and return the URL.

    Creates the repository if it does not exist. Raises UserError for an unsound export, and if the
    hub refuses or cannot be reached. The directory stays unchanged.
    """
    check_export(directory)
    return _upload(directory, repository, "Drafter exported by draftsmith")


def push_target(directory: Path, repository: str) -> str:
    """Like `push`, for a target that was exported with its drafter."""
    verify_directory(directory)
    return _upload(directory, repository, "Target trained with its drafter by draftsmith")


def _upload(directory: Path, repository: str, message: str) -> str:
    try:
        huggingface_hub.create_repo(repository, repo_type="model", exist_ok=True)
        done = huggingface_hub.upload_folder(
            repo_id=repository,
            repo_type="model",
            folder_path=directory,
            commit_message=message,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"{directory} was not pushed to {repository} ({error}). The directory is complete: log "
            "in with `hf auth login`, or check the name, and push it again"
        ) from error
    return str(done)
