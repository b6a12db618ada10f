"""A tarball of a few poems, in the layout of chinese-poetry."""

# ruff: noqa: RUF001 - Chinese text has Chinese commas.

import gzip
import io
import json
import tarfile
from pathlib import Path

FOLDER = "package/dist/quantangshi"


def poem(author: str, *paragraphs: str) -> dict[str, object]:
    return {"author": author, "paragraphs": list(paragraphs), "title": "句", "id": author}


FILES = {
    f"{FOLDER}/poet.tang.0.json": [
        poem("李白", "月月月山山，水。", "（見《紀事》）。", "[一]異文。"),
        poem("同名", "水。"),
        poem("佚名", "□□□□，○。"),
    ],
    # Stands before file 2000 in the tarball, but has a larger number.
    f"{FOLDER}/poet.song.10000.json": [poem("甲", "山水，三。"), poem("乙", "月。")],
    f"{FOLDER}/poet.song.2000.json": [
        poem("甲", "月山，一。", "月水，二。", "《注》。", "。"),
        poem("同名", "私密。"),
        poem("趙□", "私密。"),
        poem("黄{田}", "私密。"),
        poem("空", "。"),
    ],
    f"{FOLDER}/error/poet.song.0.json": [poem("錯", "錯。")],
    f"{FOLDER}/authors.song.json": [{"name": "甲", "desc": "--"}],
}


def write_tarball(path: Path, files: dict[str, list[dict[str, object]]]) -> Path:
    """Write a tarball; equal files give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tarball:
        for name, content in files.items():
            encoded = json.dumps(content, ensure_ascii=False).encode()
            member = tarfile.TarInfo(name)
            member.size = len(encoded)
            tarball.addfile(member, io.BytesIO(encoded))
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return path
