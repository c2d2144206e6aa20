"""From a workload to tensor expressions. Importing this package fills the table of rules without importing TVM."""

from raftune.dialects.tvm.lowering import products as products
