"""Known mistakes of parallel training, as a table; each is put into the real code of the ranks, one at a time.

`test_mutations` holds that `launch.certify` finds every one of them. Most leave the loss of the first step right to the
last digit, and some the loss curve: they were found in public trackers after weeks of somebody's training.

To add one, append a `tests.certify.mutation.Mutation` to the table of its axis (for a new one, join a module below):

- ``mesh``: the smallest overrides of `launch.certify` on which it must show. Axes and models shrink as there; meshes of
  2, 4 and 8 ranks share one pool each, so a mesh that is there already costs a second.
- ``target``: what is replaced, as ``module:function`` or ``module:Class.method``: where it is *used*, if modules import
  it by name.
- ``mutate``: a function at the top of the module. It is called in place of the target with the original first, and
  then the target's own arguments: ``def lose_halo(original, streams, axis, *, width): ...``. Take what you do not
  read as ``*args, **options``, so that the target may change.
- ``shows``: a shell pattern of a line that must be among `Certificate.failures`: a mistake must be found where it
  bites, not just anywhere. Where one of our own assertions stops it first, a pattern of the error's last line.
- ``also``: further (target, mutate) pairs, where one replacement is not enough.

A mutation must make equal collectives on all ranks, or it hangs instead of being wrong. The test fails, too, if a
target never ran.
"""

from tests.certify.balanced import BALANCED_EXPERTS
from tests.certify.context import CONTEXT
from tests.certify.data import DATA
from tests.certify.experts import EXPERTS
from tests.certify.pipeline import PIPELINE
from tests.certify.recompute import RECOMPUTE
from tests.certify.tensor import TENSOR

MUTATIONS = (*DATA, *EXPERTS, *BALANCED_EXPERTS, *CONTEXT, *TENSOR, *PIPELINE, *RECOMPUTE)
