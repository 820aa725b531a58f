//! THE table of kernels: one row per entry point.
//!
//! On the GPU a row becomes a PTX entry of that literal name; on the host it becomes an [`Entry`]
//! with a function the simulator can call. The PTX builder, the planner, the tests and the support
//! page all read this table; nobody keeps a second list.
#![cfg_attr(
    any(target_arch = "nvptx64", not(feature = "sim"), test),
    allow(
        unused_imports,
        reason = "a device build has one family, a host build without simulator no kernel"
    )
)]

/// Rows of one argument list, of one family and role. `NAME => BODY, T = TYPE, { head_size, rows,
/// keys, threads, min_blocks, shared, hot, min_sm }`; where blocks form clusters or pass data to
/// each other, `cluster` (the most blocks of a cluster), `pads` where smaller heads are padded, and
/// `communicates` follow, `formats` where the KV cache is quantized, `outputs` ([`Output`]) where
/// there are others than `T`, `exact_sums` where a family has a kernel for log-sum-exp
/// apart, and `value_size` where values have another head size than keys.
/// Tensor maps come first, numbered from 0, `[q 0, k 1]`, then pointer arguments, the by-value
/// parameter struct last. `seqlens_k: i32` stands for all tensors that say how long sequences are
/// (`entries!`). What all rows have in common may come before them: `each { head_size, …
/// }, { NAME => BODY, T = TYPE; }`.
macro_rules! kernels {
    ($table:ident, $family:ident: $role:ident, $feature:literal, $args:tt, each $spec:tt, { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty;)* }) => {
        kernels!($table, $family: $role, $feature, $args, { $($(#[$meta])* $name => $body, $t = $ty, $spec;)* });
    };
    ($table:ident, $family:ident: $role:ident, $feature:literal, ([$($map:tt)*] $($args:tt)*), { $($rows:tt)* }) => {
        entries!({} {} [$($args)*] ([$($map)*] $table, $family: $role, $feature, { $($rows)* }));
    };
    ($table:ident, $family:ident: $role:ident, $feature:literal, ($($args:tt)*), { $($rows:tt)* }) => {
        entries!({} {} [$($args)*] ([] $table, $family: $role, $feature, { $($rows)* }));
    };
}

/// The entries of a table. First it goes through the arguments, and collects the pointers of an
/// entry and what the kernel takes: the tensors of lengths are separate pointers, which the kernel
/// takes as `Seqlens`.
macro_rules! entries {
    ({ $($pointers:tt)* } { $($taken:tt)* } [seqlens_k: i32 $($more:tt)*] $table:tt) => {
        entries!(
            { $($pointers)* seqlens_k: i32, query_seqlens: i32, }
            { $($taken)* crate::tile::seqlens::Seqlens::new(seqlens_k, query_seqlens), }
            [$($more)*] $table
        );
    };
    ({ $($pointers:tt)* } { $($taken:tt)* } [$arg:ident: $ty:tt $($more:tt)*] $table:tt) => {
        entries!({ $($pointers)* $arg: $ty, } { $($taken)* $arg, } [$($more)*] $table);
    };
    ($pointers:tt $taken:tt [, $($more:tt)*] $table:tt) => {
        entries!($pointers $taken [$($more)*] $table);
    };
    (
        $pointers:tt $taken:tt [; $p:ident: $pty:ty]
        ($maps:tt $table:ident, $family:ident: $role:ident, $feature:literal, $rows:tt)
    ) => {
        entries!(@table $table, $family: $role, $feature, ($maps $pointers $taken $p: $pty), $rows);
    };
    (
        @table $table:ident, $family:ident: $role:ident, $feature:literal, $args:tt,
        { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty, $spec:tt;)* }
    ) => {
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
        static $table: &[crate::registry::Entry] = &[
            $($(#[$meta])* host_entry!($name, $body, $t = $ty, $family: $role, $feature, $args, $spec),)*
        ];
    };
}

#[cfg(target_arch = "nvptx64")]
macro_rules! device_entry {
    (
        $name:ident, $body:expr,
        (
            [$($map:ident $i:literal),*]
            { $($arg:ident: $aty:ty,)* } { $($taken:expr,)* } $p:ident: $pty:ty
        )
    ) => {
        #[unsafe(no_mangle)]
        unsafe extern "ptx-kernel" fn $name($($map: crate::simt::TensorMapParam,)* $($arg: crate::simt::Global<$aty>,)* $p: $pty) {
            $(
                let _ = $map;
                let $map = crate::simt::tensor_map_param!($name, $i);
            )*
            $body($($map,)* $($taken,)* $p)
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! host_entry {
    (
        $name:ident, $body:expr, $t:ident = $ty:ty, $family:ident: $role:ident, $feature:literal,
        (
            [$($map:ident $i:literal),*]
            { $($arg:ident: $aty:ty,)* } { $($taken:expr,)* } $p:ident: $pty:ty
        ),
     { head_size: $head:expr, rows: $rows:expr, keys: $keys:expr, threads: $threads:expr, min_blocks: $min_blocks:expr, shared: $shared:expr, hot: $hot:expr, min_sm: $sm:expr
       $(, cluster: $cluster:expr)? $(, pads: $pads:expr)? $(, communicates: $communicates:expr)? $(, formats: $formats:expr)? $(, outputs: [$($output:ident),*])? $(, exact_sums: $exact_sums:literal)? $(, value_size: $value_size:expr)? }) => {
        crate::registry::Entry {
            name: stringify!($name),
            family: crate::registry::Family::$family,
            feature: $feature,
            role: crate::registry::Role::$role,
            dtype: <$ty as crate::num::Element>::DTYPE,
            formats: optional!(&[] $(, $formats)?),
            outputs: optional!(&[crate::registry::Output::Element] $(, &[$(crate::registry::Output::$output),*])?),
            exact_sums: optional!(false $(, $exact_sums)?),
            head_size: $head,
            value_size: optional!($head $(, $value_size)?),
            pads: optional!(false $(, $pads)?),
            rows: $rows,
            keys: $keys,
            threads: $threads,
            min_blocks: $min_blocks,
            shared_bytes: $shared,
            hot: $hot,
            min_sm: $sm,
            max_cluster: optional!(1 $(, $cluster)?),
            communicates: optional!(false $(, $communicates)?),
            arguments: &[$(stringify!($map),)* $(stringify!($arg)),*],
            tensor_maps: { const MAPS: &[usize] = &[$($i),*]; MAPS.len() },
            params_bytes: size_of::<$pty>(),
            layer_words: <$pty as crate::params::Layer>::FIXES,
            #[cfg(all(feature = "sim", not(test)))]
            simulate: {
                #[allow(dead_code)]
                type $t = $ty;
                // No closure: of all closures the compiler would put the way in into one unit, and
                // with it the kernels.
                fn simulate(arguments: &gqa_sim::Arguments) {
                    let mut next = 0..;
                    $(let $map = arguments.tensor_map(next.next().unwrap_or_default());)*
                    $(let $arg: crate::simt::Global<$aty> = arguments.global(next.next().unwrap_or_default());)*
                    let $p: $pty = arguments.params(next.next().unwrap_or_default());
                    $body($($map,)* $($taken,)* $p)
                }
                simulate
            },
        }
    };
}

/// What a row says, or else what most rows mean.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! optional {
    ($default:expr) => {
        $default
    };
    ($default:expr, $given:expr) => {
        $given
    };
}

/// Oldest compute capability, times ten, of a shape's kernel for a 16-bit type.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! oldest_sm {
    ($shape:ty, $t:ty) => {
        crate::registry::entry::oldest_sm(
            <$shape>::MIN_SM,
            <$t as crate::num::MmaElement>::MIN_SM,
            <$shape>::SHARED_BYTES,
        )
    };
}

/// Rows of a kernel with one shape of tiles per head size, for both 16-bit types: `F16 NAME, BF16
/// NAME => SHAPE, blocks that fit on an SM together`, and then what is special about it. A `quick`
/// device build leaves out the second set.
macro_rules! kernels_by_head_size {
    ($table:ident, $family:ident: $role:ident, $feature:literal, $args:tt, communicates: $communicates:literal, { $($quick:tt)* }, $($rest:tt)*) => {
        kernels_by_head_size!($table, $family: $role, $feature, $args, communicates: $communicates, outputs: [Element], { $($quick)* }, $($rest)*);
    };
    ($table:ident, $family:ident: $role:ident, $feature:literal, $args:tt, communicates: $communicates:literal, outputs: $outputs:tt, { $($quick:tt)* }, unless quick { $($full:tt)* }) => {
        kernels_by_head_size!(@rows $table, $family: $role, $feature, $args, $communicates, $outputs, {
            @(all()) $($quick)*
            @(not(all(target_arch = "nvptx64", feature = "quick"))) $($full)*
        });
    };
    (@rows $table:ident, $family:ident: $role:ident, $feature:literal, $args:tt, $communicates:literal, $outputs:tt, {
        $(@($when:meta) $($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal $(, exact_sums: $exact:literal)? $(, value_size: $values:literal)?;)*)*
    }) => {
        kernels!($table, $family: $role, $feature, $args, { $($(
            #[cfg($when)]
            $f16 => <$shape>::run, T = f16, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: oldest_sm!($shape, f16),
                communicates: $communicates, outputs: $outputs $(, exact_sums: $exact)? $(, value_size: $values)? };
            #[cfg($when)]
            $bf16 => <$shape>::run, T = bf16, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: oldest_sm!($shape, bf16),
                communicates: $communicates, outputs: $outputs $(, exact_sums: $exact)? $(, value_size: $values)? };
        )*)* });
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod entry;
#[cfg(not(target_arch = "nvptx64"))]
pub mod prologue_grid;
#[cfg(not(target_arch = "nvptx64"))]
pub use entry::{Entry, Family, Output, Role, Target, entries, find, number, runs_on};

// A module for each kind of kernel, which the compiler takes apart from the others.
mod decode;
mod decode_paged;
mod decode_quantized;
mod general;
mod hopper;
mod latent;
mod peers;
mod prologue;
mod split_kv;
mod tiled;

/// Every table, one per argument list.
#[cfg(not(target_arch = "nvptx64"))]
static TABLES: &[&[&[Entry]]] = &[
    prologue::TABLES,
    general::TABLES,
    tiled::TABLES,
    hopper::TABLES,
    latent::TABLES,
    split_kv::TABLES,
    decode::TABLES,
    decode_quantized::TABLES,
    decode_paged::TABLES,
    peers::TABLES,
];
