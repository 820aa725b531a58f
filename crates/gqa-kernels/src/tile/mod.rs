//! Building blocks of tensor-core kernels: tiles in shared memory, fragments.
