"""The hand-off as two state machines, one at each end. Pure: no I/O, no clock (`now` is seconds, monotonic).

    sender (`Outgoing`)                              receiver (`Incoming`)

      NEW                                                (none)
       | offer_sent            Offer >
    OFFERED                                              RESERVED ---------+
       | granted               < Granted                    | ready        |
    GRANTED ----------+                                     v              |
       | blocks_ready |        Ready > (many)            PULLING           | commit (all was here)
    SENDING           |                                     | commit       |
       | commit_sent  |                                     v              |
    COMMITTING <------+        Commit >                  COMMITTING <------+
       | committed             < Committed                  | admitted, once every block is verified
      DONE                                                DONE

    Anything that ends it (refused, abandoned, lease over, peer lost, a failed pull) leads to FAILED from
    every state but DONE.

What each end holds: the sender's blocks stay pinned while `owns_blocks`; the receiver's slots belong to
the hand-off while `owns_blocks`, and to the admitted sequence after DONE. `take_release` says once, and
once only, that they are to be given back; at the receiver not before the last pull into them has ended.

Late and duplicate messages are ignored. What no order of messages can bring about raises `HandoffError`; the
caller ends that one hand-off.
"""

from __future__ import annotations

from baton.kvcache.handoff_states import INCOMING, OUTGOING, Announcement, Event, HandoffError, State
from baton.kvcache.incoming import Incoming
from baton.kvcache.outgoing import Outgoing

__all__ = ["INCOMING", "OUTGOING", "Announcement", "Event", "HandoffError", "Incoming", "Outgoing", "State"]
