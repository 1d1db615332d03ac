"""Sends a published folder to the Hugging Face hub; huggingface_hub does the work, and keeps the login."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

from qerl_core.checks import ConfigError, TrainingStopped

REMEDY = "Log in with `hf auth login`, with a token that may write, or publish to a folder: to=folder out=DIR"


@dataclass(frozen=True)
class Sender:
    """A place at the hub that this machine may write to, as far as one can know before."""

    repo: str
    kind: Literal["model", "dataset"]

    @classmethod
    def logged_in(cls, repo: str, kind: Literal["model", "dataset"]) -> Sender:
        """Raises ConfigError without a login, or where the hub cannot be reached."""
        try:
            HfApi().whoami()
        except LocalTokenNotFoundError as error:
            raise ConfigError(f"to=hub: this machine is not logged in at the Hugging Face hub. {REMEDY}") from error
        except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:  # OSError: no network, of every HTTP library
            raise ConfigError(f"to=hub: the hub does not answer, or refuses the login ({error}). {REMEDY}") from error
        return cls(repo, kind)

    def send(self, folder: Path) -> str:
        """Upload every file of `folder` in one commit; returns its address. The folder stays."""
        api = HfApi()
        try:
            api.create_repo(self.repo, repo_type=self.kind, exist_ok=True)
            commit = api.upload_folder(
                repo_id=self.repo, folder_path=folder, repo_type=self.kind, commit_message="Publish with qerl-bench"
            )
        except (HfHubHTTPError, OSError) as error:
            again = f"hf upload {self.repo} {quote(str(folder))} --repo-type {self.kind}"
            raise TrainingStopped(
                f"the upload failed ({error}); {folder} is complete. To try again: {again}"
            ) from error
        return str(commit)
