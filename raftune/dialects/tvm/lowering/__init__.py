"""From a workload to tensor expressions. Importing this package fills the table of rules without importing TVM."""

from raftune.dialects.tvm.lowering import attention as attention
from raftune.dialects.tvm.lowering import convolutions as convolutions
from raftune.dialects.tvm.lowering import indexing as indexing
from raftune.dialects.tvm.lowering import normalization as normalization
from raftune.dialects.tvm.lowering import pointwise as pointwise
from raftune.dialects.tvm.lowering import pooling as pooling
from raftune.dialects.tvm.lowering import products as products
from raftune.dialects.tvm.lowering import reductions as reductions
from raftune.dialects.tvm.lowering import views as views
