"""Actions on files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .office import Action, Office, PersonId, Text, found, people, shown

FileId = Annotated[str, Field(description="A file's id, such as f03.")]
Folder = Literal["Projects", "Archive", "Shared", "Drafts"]


class ListFiles(Action):
    """The files of a folder; of all, if none is named."""

    folder: Folder | None = None

    def do(self, office: Office) -> Any:
        there = {key: row for key, row in office.files.items() if not row["deleted"]}
        return [row for row in shown(there, "deleted") if self.folder in (None, row["folder"])]


class MoveFile(Action):
    """Move a file into another folder."""

    file: FileId
    folder: Folder

    def do(self, office: Office) -> Any:
        found(office.files, self.file, "file", gone="deleted")["folder"] = self.folder
        return "moved"


class RenameFile(Action):
    """Give a file another name."""

    file: FileId
    name: Text

    def do(self, office: Office) -> Any:
        found(office.files, self.file, "file", gone="deleted")["name"] = self.name
        return "renamed"


class ShareFile(Action):
    """Share a file with one more person."""

    file: FileId
    person: PersonId

    def do(self, office: Office) -> Any:
        row = found(office.files, self.file, "file", gone="deleted")
        row["shared_with"] = sorted({*row["shared_with"], *people(office, [self.person])})
        return "shared"


class DeleteFile(Action):
    """Delete a file."""

    file: FileId

    def do(self, office: Office) -> Any:
        found(office.files, self.file, "file", gone="deleted")["deleted"] = True
        return "deleted"


ACTIONS = (
    ListFiles,
    MoveFile,
    RenameFile,
    ShareFile,
    DeleteFile,
)
