"""The digests of a run's data and of its chat template, frozen with its recipe: a file that changed between two starts
would go unnoticed.

Groups of a run are numbers of rows. In a file that was changed, cut or reversed, the same numbers are other prompts; by
another template, all are.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.tasks.filtering import kept_rows
from pipeline.tasks.rows.saved_folders import data_files, refusing_unreadable
from pipeline.tasks.tokenizer import Tokenizer
from precision.text import listed, one_line

DIGEST_KEYS = frozenset(("task.sha256", "task.template_sha256"))
"""What `with_digest` adds to a recipe."""


def with_digest(recipe: Recipe, run: RunDirectory) -> Recipe:
    """The recipe with `task.sha256` and `task.template_sha256`: those of the run's frozen recipe, else of what there is
    now. Raises RecipeError for data that cannot be read, ModelError for a tokenizer that cannot."""
    if not isinstance(recipe.task, DataTask):
        return recipe
    if os.path.lexists(run.path / "recipe.yaml") and run.num_settled():
        frozen = run.recipe().task
        return _with(recipe, frozen if isinstance(frozen, DataTask) else DataTask.model_construct(name="data"))
    return with_digest_of_now(recipe)


def with_digest_of_now(recipe: Recipe) -> Recipe:
    """As `with_digest`, of a run that begins."""
    task = recipe.task
    if not isinstance(task, DataTask):
        return recipe
    template = Tokenizer.load(recipe.model.path).template_sha256 if task.chat_template else None
    sha256 = digest(task) if task.sha256 is None else task.sha256
    return _with(recipe, task.model_copy(update=dict(sha256=sha256, template_sha256=template)))


def _with(recipe: Recipe, other: DataTask) -> Recipe:
    """With the digests of `other` where the recipe names none."""
    names = ("sha256", "template_sha256")
    missing = {name: getattr(other, name) for name in names if getattr(recipe.task, name) is None}
    return recipe.model_copy(update=dict(task=recipe.task.model_copy(update=missing)))


def check_template(section: object, tokenizer: Tokenizer) -> None:
    """Raises RecipeError when the chat template is not that of `section.template_sha256`."""
    if not isinstance(section, DataTask) or section.template_sha256 is None:
        return
    if (found := tokenizer.template_sha256) != section.template_sha256:
        raise RecipeError(
            f"the chat template of {tokenizer.folder} is not that of this run (sha256 {found[:12]}, expected "
            f"{section.template_sha256[:12]}); put it back, or begin another run.name with it"
        )


def check_digest(section: DataTask) -> None:
    """Raises RecipeError when the data is not that of `section.sha256`."""
    if section.sha256 is not None and (found := digest(section)) != section.sha256:
        paths = listed([one_line(path, 200) for path in data_paths(section)], between=" or ")
        raise RecipeError(
            f"{paths} is not the data of this run{_or_kept(section)} (sha256 {found[:12]}, expected "
            f"{section.sha256[:12]}); put it back, or begin another run.name with it"
        )


def _or_kept(section: DataTask) -> str:
    return ", or task.filter keeps other rows of it" if any(part.filter for part in _parts(section)) else ""


def digest(section: DataTask) -> str:
    """Of all data of the section, training before held out, and of which rows its filters keep. Raises RecipeError for
    what cannot be read, and as pipeline.tasks.filtering does."""
    data = digest_of_data(*data_paths(section))
    kept = [kept_rows(path, part) for part in _parts(section) if part.filter for path in data_paths(part)]
    return data if not kept else hashlib.sha256(b"\n".join([data.encode(), *kept])).hexdigest()


def digest_of_data(*paths: Path) -> str:
    """Of a file's bytes, as sha256sum gives it; of several files that of their digests. Raises RecipeError for what
    cannot be read."""
    digests: list[bytes] = []
    for path in paths:
        with refusing_unreadable(path):
            digests += map(_of_file, data_files(path))
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def data_paths(section: DataTask) -> list[Path]:
    """Files and folders of every source, training before held out."""
    both = [(part.path, part.held_out_path) for part in _parts(section)]
    return [path for paths in both for path in paths if path is not None]


def _parts(section: DataTask) -> list[DataTask]:
    return [section.of(source) for source in section.sources] or [section]


def _of_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
