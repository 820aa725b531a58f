//! THE table of kernels: one row per entry point.
//!
//! On the GPU a row becomes a PTX entry of that literal name; on the host it becomes an [`Entry`] with a function the simulator can
//! call. The PTX builder, the planner, the tests and the support page all read this table; nobody keeps a second list.

#[cfg(not(target_arch = "nvptx64"))]
mod entry;
#[cfg(not(target_arch = "nvptx64"))]
pub use entry::{Entry, Family, entries, find};

use crate::num::{bf16, f16};
use crate::params::{AttentionParams, PrologueParams};
use crate::simt::Global;

/// Rows of one argument list. `NAME => BODY, T = TYPE, { head_size, rows, keys, threads, min_blocks, shared, hot, min_sm }`.
/// Pointer arguments come first, the by-value parameter struct last.
macro_rules! kernels {
    ($table:ident, $family:ident, $feature:literal, $args:tt, { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty, $spec:tt;)* }) => {
        $(
            $(#[$meta])*
            #[cfg(all(target_arch = "nvptx64", feature = $feature))]
            const _: () = {
                #[allow(dead_code)]
                type $t = $ty;
                device_entry!($name, $body, $args);
            };
        )*
        #[cfg(not(target_arch = "nvptx64"))]
        pub(crate) static $table: &[Entry] = &[
            $($(#[$meta])* host_entry!($name, $body, $t = $ty, $family, $args, $spec),)*
        ];
    };
}

#[cfg(target_arch = "nvptx64")]
macro_rules! device_entry {
    ($name:ident, $body:expr, ($($arg:ident: $aty:ty),* ; $p:ident: $pty:ty)) => {
        #[unsafe(no_mangle)]
        unsafe extern "ptx-kernel" fn $name($($arg: Global<$aty>,)* $p: $pty) {
            $body($($arg,)* $p)
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! host_entry {
    ($name:ident, $body:expr, $t:ident = $ty:ty, $family:ident, ($($arg:ident: $aty:ty),* ; $p:ident: $pty:ty),
     { head_size: $head:expr, rows: $rows:expr, keys: $keys:expr, threads: $threads:expr, min_blocks: $min_blocks:expr, shared: $shared:expr, hot: $hot:expr, min_sm: $sm:expr }) => {
        Entry {
            name: stringify!($name),
            family: Family::$family,
            dtype: <$ty as crate::num::Element>::DTYPE,
            head_size: $head,
            rows: $rows,
            keys: $keys,
            threads: $threads,
            min_blocks: $min_blocks,
            shared_bytes: $shared,
            hot: $hot,
            min_sm: $sm,
            arguments: &[$(stringify!($arg)),*],
            params_bytes: size_of::<$pty>(),
            simulate: {
                #[allow(dead_code)]
                type $t = $ty;
                |arguments| {
                    let mut next = 0..;
                    $(let $arg: Global<$aty> = arguments.global(next.next().unwrap_or_default());)*
                    let $p: $pty = arguments.params(next.next().unwrap_or_default());
                    $body($($arg,)* $p)
                }
            },
        }
    };
}

// Families register here, e.g.
// kernels!(GENERAL, General, "family-general", (q: T, …; p: AttentionParams), { gqa_general_f32 => general::<f32>, T = f32, { … }; });
