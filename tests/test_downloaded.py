"""Packages that tests download: without a network a test is skipped, in CI it fails."""

from __future__ import annotations

import subprocess
import sys

import downloaded
import pytest


@pytest.mark.skipif(sys.version_info < (3, 11), reason="packages are pinned for newer versions")
def test_a_test_without_its_packages_is_skipped_but_fails_in_ci(monkeypatch, tmp_path):
    asked = []

    def pip(words, **_):
        asked.append(words)
        return subprocess.CompletedProcess(words, 1, "", "trying\nno network\n")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    said = r"a package cannot be downloaded: \['no network'\]"
    with pytest.raises(pytest.skip.Exception, match=said):
        downloaded.pinned("a package", "one==1")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=said):
        downloaded.pinned("a package", "one==1")
    with pytest.raises(pytest.fail.Exception, match=r"two==2 cannot be downloaded"):
        downloaded.kept("made", "recipe", lambda work: downloaded.source("two==2", work))
    assert len(asked) == 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"] * 2
