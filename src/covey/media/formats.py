"""Tell the format of a file by its first bytes: an image that covey reads, or another kind of file."""

from __future__ import annotations

from collections.abc import Mapping

from covey.texts import tr

READ = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are read. Others are not tried: Pillow runs Ghostscript on EPS files."""

_SIGNATURES: Mapping[bytes, str] = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"\x00\x00\x00\x0cjP  ": "JPEG 2000",
}
_VIDEO = (b"mp4", b"iso", b"avc", b"M4V", b"qt ", b"3gp")
_PHOTO = (b"heic", b"heix", b"mif1", b"heim", b"hevc")


def format_of(head: bytes) -> str | None:
    """Return the format of an image that begins with `head`, 16 bytes or more; None for what is none."""
    for signature, name in _SIGNATURES.items():
        if head.startswith(signature):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:2] == b"BM" and head[6:10] == b"\0\0\0\0":
        return "BMP"
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF"
    return None


def other_kind_of(head: bytes) -> str:
    """Return what a file that is no image seems to be, with what to do about it: `HTML`; "" where that is not
    known."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        return tr("a pointer of Git LFS: fetch the files themselves with `git lfs pull`")
    if text.startswith((b"<svg", b"<?xml")) and b"<svg" in text:
        return tr("SVG, a drawing without pixels: convert it to PNG")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<body")):
        return tr("an HTML page")
    if text.startswith((b"{", b"[")):
        return tr("JSON")
    if head[4:8] == b"ftyp" and head[8:12] in _PHOTO:
        return tr("HEIC: convert it to JPEG or PNG")
    if (head[4:8] == b"ftyp" and head[8:11] in _VIDEO) or head.startswith(b"\x1aE\xdf\xa3"):
        return tr("video")
    if head.startswith(b"%PDF"):
        return tr("PDF: convert its pages to PNG")
    if head.startswith(b"PK\x03\x04"):
        return tr("a ZIP archive")
    return ""
