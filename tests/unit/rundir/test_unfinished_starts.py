"""Whether a start whose supervise has gone is over."""

import errno
import json
import os
import tempfile
from dataclasses import asdict, replace

from hpc_tune.rundir import owner


def test_a_run_on_a_disk_that_is_full_is_not_taken_for_one_that_has_ended(tmp_path, monkeypatch):
    assert owner.has_run_ended(tmp_path)
    elsewhere = replace(owner.make_owner("nonce", tmp_path), host="elsewhere", place="elsewhere")
    (tmp_path / owner.LOCK_FILE).write_text(json.dumps(asdict(elsewhere)))
    assert not owner.has_run_ended(tmp_path)

    def refuse(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    assert not owner.has_run_ended(tmp_path)
