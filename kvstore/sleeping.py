"""Sessions that leave the device and come back, also after a restart."""

from __future__ import annotations

import numpy as np

from kvstore.counters import Counters
from kvstore.manifest import Entry, Manifest, manifest_name
from kvstore.records import NONE
from kvstore.residency import Residency
from kvstore.session import Session
from kvstore.shares import Shares
from kvstore.spans import cut_spans
from kvstore.table import PageTable
from kvstore.tiering import Tiering

LOAD_TIMEOUT = 5.0  # seconds that a lookup waits for a manifest


class Sleeping:
    """Puts sessions to sleep and finds those that sleep in a tier.

    A session that falls asleep is written out whole: its last page, though it is not full, and a manifest that names
    its pages. With that it survives the process. Without a lower tier it stays where it is.
    """

    def __init__(self, residency: Residency, tiering: Tiering, shares: Shares, counters: Counters) -> None:
        self._residency = residency
        self._tiering = tiering
        self._shares = shares
        self._counters = counters

    def put_to_sleep(self, session: Session) -> None:
        """Write an idle session out; it leaves the device when that is done (`leave_device`)."""
        session.asleep = True
        self._counters.sleeps += 1
        if not self._tiering.tiers or not session.table:
            return
        for record in dict.fromkeys(session.table.records):
            self._residency.seal(record)
        self._tiering.write_through(session.table.records, 0)
        if self._tiering.lasting is not None and session.id is not None:
            manifest = self._manifest(session)
            self._tiering.write_record(manifest_name(session.owner, session.id), manifest.encode())

    def leave_device(self, session: Session) -> bool:
        """Take a sleeping session's pages from the device, from the end, as far as a tier has them and nobody else uses
        them. Returns whether that was all: otherwise background work is not done with some."""
        records = self._residency.records
        for record in dict.fromkeys(session.table.records[::-1]):
            if records.page[record] == NONE:
                continue
            used = records.refs[record] > 1 and records.refs[record] > session.table.records.count(record)
            if used or records.pins[record] or records.resident_children[record]:
                return True
            if records.locks[record] or not records.stored[record].any():
                return not self._tiering.tiers
            self._residency.evict(record, "sleep")
        return True

    def load(self, session: Session) -> bool:
        """Fill a new session from its manifest, if a tier has one. The pages are in tiers still."""
        tier = self._tiering.lasting
        if tier is None or session.id is None:
            return False
        name = manifest_name(session.owner, session.id)
        if name not in self._tiering.manifests:
            return False
        try:
            manifest = Manifest.decode(self._tiering.read_record(name).result(LOAD_TIMEOUT))
        except TimeoutError:  # the tier is slow: another time
            self._tiering.failed(f"{tier.name}:manifest", "a sleeping session was not read in time")
            return False
        except Exception as error:  # whatever it is, the session is computed again
            self._tiering.failed(f"{tier.name}:manifest", f"a sleeping session cannot be read: {error!r}")
            self._tiering.manifests.pop(name, None)
            return False
        if (manifest.owner, manifest.session_id) != (session.owner, session.id):
            return False
        self._fill(session, manifest)
        return session.length > 0

    def forget(self, owner: str, session_id: str) -> None:
        """Remove a session's manifest, if there is one, also one that is just being written."""
        if self._tiering.lasting is not None:
            self._tiering.delete_record(manifest_name(owner, session_id))

    def _manifest(self, session: Session) -> Manifest:
        records = self._residency.records
        assert session.id is not None
        made = records.where((records.origin == session.number) & records.indexed)
        left = np.setdiff1d(made, session.table.ids())
        return Manifest(
            owner=session.owner,
            session_id=session.id,
            pool=self._shares.pools[session.pool].name,
            public_tokens=session.public_tokens,
            keyed_pages=session.keyed_pages,
            spans=list(session.spans),
            entries=[self._entry(*entry) for entry in session.table],
            left=[records.key_of(record) for record in left.tolist()],
        )

    def _entry(self, record: int, start: int, count: int) -> Entry:
        records = self._residency.records
        parent = int(records.parent[record])
        return Entry(
            key=records.key_of(record),
            parent=records.key_of(parent) if parent != NONE else b"",
            start=start,
            count=count,
            position=int(records.position[record]),
            tokens=records.tokens_of(record),
        )

    def _fill(self, session: Session, manifest: Manifest) -> None:
        """The session as it was, up to the first page that no tier has."""
        table = PageTable()
        for entry in manifest.entries:
            record = self._residency.recognized(entry)
            if record == NONE:
                break
            table.append(record, entry.start, entry.count)
        self._residency.hold(table.ids(), locked=False)
        # So that dropping the session drops its other branches, too.
        for key in manifest.left:
            if (record := self._residency.index.find(key)) != NONE:
                self._residency.records.origin[record] = session.number
        spans = list(manifest.spans)
        cut_spans(spans, table.tokens)
        session.replace_contents(table, spans)
        session.keyed_pages = min(manifest.keyed_pages, len(table))
        session.public_tokens = manifest.public_tokens
        if manifest.pool in (pool.name for pool in self._shares.pools):
            session.pool = self._shares.number(manifest.pool)
        session.asleep = True
