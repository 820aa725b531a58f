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
    ($table:ident, $family:ident: $role:ident, $module:literal, $args:tt, each $spec:tt,
        { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty;)* }) => {
        kernels!($table, $family: $role, $module, $args,
            { $($(#[$meta])* $name => $body, $t = $ty, $spec;)* });
    };
    ($table:ident, $family:ident: $role:ident, $module:literal, ([$($map:tt)*] $($args:tt)*),
        { $($rows:tt)* }) => {
        entries!({} {} [$($args)*] ([$($map)*] $table, $family: $role, $module, { $($rows)* }));
    };
    ($table:ident, $family:ident: $role:ident, $module:literal, ($($args:tt)*),
        { $($rows:tt)* }) => {
        entries!({} {} [$($args)*] ([] $table, $family: $role, $module, { $($rows)* }));
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
        ($maps:tt $table:ident, $family:ident: $role:ident, $module:literal, $rows:tt)
    ) => {
        entries!(@table $table, $family: $role, $module, ($maps $pointers $taken $p: $pty), $rows);
    };
    (
        @table $table:ident, $family:ident: $role:ident, $module:literal, $args:tt,
        { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty, $spec:tt;)* }
    ) => {
        $(
            $(#[$meta])*
            #[cfg(all(target_arch = "nvptx64", ptx_module = $module))]
            const _: () = {
                #[allow(dead_code)]
                type $t = $ty;
                device_entry!($name, $body, $args);
            };
        )*
        #[cfg(not(target_arch = "nvptx64"))]
        static $table: &[crate::registry::Entry] = &[
            $($(#[$meta])* host_entry!(
                $name, $body, $t = $ty, $family: $role, $module, $args, $spec
            ),)*
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
        unsafe extern "ptx-kernel" fn $name(
            $($map: crate::simt::TensorMapParam,)*
            $($arg: crate::simt::Global<$aty>,)*
            $p: $pty
        ) {
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
        $name:ident, $body:expr, $t:ident = $ty:ty, $family:ident: $role:ident, $module:literal,
        (
            [$($map:ident $i:literal),*]
            { $($arg:ident: $aty:ty,)* } { $($taken:expr,)* } $p:ident: $pty:ty
        ),
     { head_size: $head:expr, rows: $rows:expr, keys: $keys:expr, threads: $threads:expr,
       min_blocks: $min_blocks:expr, shared: $shared:expr, hot: $hot:expr, min_sm: $sm:expr
       $(, cluster: $cluster:expr)? $(, pads: $pads:expr)? $(, communicates: $communicates:expr)?
       $(, formats: $formats:expr)? $(, outputs: [$($output:ident),*])?
       $(, exact_sums: $exact_sums:literal)? $(, value_size: $value_size:expr)? }) => {
        crate::registry::Entry {
            name: stringify!($name),
            family: crate::registry::Family::$family,
            module: $module,
            role: crate::registry::Role::$role,
            dtype: <$ty as crate::num::Element>::DTYPE,
            formats: optional!(&[] $(, $formats)?),
            outputs: optional!(
                &[crate::registry::Output::Element]
                $(, &[$(crate::registry::Output::$output),*])?
            ),
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
                    $(let $arg: crate::simt::Global<$aty> =
                        arguments.global(next.next().unwrap_or_default());)*
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
    ($table:ident, $family:ident: $role:ident, $module:literal, $args:tt,
        communicates: $communicates:literal, { $($quick:tt)* }, $($rest:tt)*) => {
        kernels_by_head_size!($table, $family: $role, $module, $args, communicates: $communicates,
            outputs: [Element], { $($quick)* }, $($rest)*);
    };
    ($table:ident, $family:ident: $role:ident, $module:literal, $args:tt,
        communicates: $communicates:literal, outputs: $outputs:tt, { $($quick:tt)* },
        unless quick { $($full:tt)* }) => {
        kernels_by_head_size!(@rows $table, $family: $role, $module, $args, $communicates,
            $outputs, {
            @(all()) $($quick)*
            @(not(all(target_arch = "nvptx64", feature = "quick"))) $($full)*
        });
    };
    (@rows $table:ident, $family:ident: $role:ident, $module:literal, $args:tt,
        $communicates:literal, $outputs:tt, {
        $(@($when:meta) $(
            $f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal
            $(, exact_sums: $exact:literal)? $(, value_size: $values:literal)?;
        )*)*
    }) => {
        kernels!($table, $family: $role, $module, $args, { $($(
            #[cfg($when)]
            $f16 => <$shape>::run, T = f16, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: oldest_sm!($shape, f16),
                communicates: $communicates, outputs: $outputs $(, exact_sums: $exact)?
                $(, value_size: $values)? };
            #[cfg($when)]
            $bf16 => <$shape>::run, T = bf16, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: oldest_sm!($shape, bf16),
                communicates: $communicates, outputs: $outputs $(, exact_sums: $exact)?
                $(, value_size: $values)? };
        )*)* });
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod entry;
#[cfg(not(target_arch = "nvptx64"))]
#[macro_use]
mod family;
#[cfg(not(target_arch = "nvptx64"))]
pub mod prologue_grid;
#[cfg(not(target_arch = "nvptx64"))]
pub use entry::{Entry, Output, Role, entries, find};
#[cfg(not(target_arch = "nvptx64"))]
pub use family::{Target, number, runs_on};

// A file for each kind of kernel, which the compiler takes apart from the others.
mod blackwell;
mod blackwell_decode;
mod decode;
mod decode_quantized;
mod general;
mod hopper;
mod latent;
mod peers;
mod prologue;
mod split_kv;
mod tiled;

#[cfg(not(target_arch = "nvptx64"))]
families! {
    prologue {
        // SM 80 has an instruction that rounds to bfloat16, SM 89 those that convert float8. Tensor
        // cores of SM 75 have float16 alone.
        /// Unpack, rotate, append.
        Prologue: "prologue", "prologue", ["sm_70", "sm_80", "sm_89" ptx 81];
    }
    general {
        /// Memory-efficient attention, for almost everything legal.
        General: "general", "general", ["sm_70"];
        /// Attention with all scores in memory.
        Unfused: "unfused", "unfused", ["sm_70"];
    }
    tiled {
        /// Tensor-core flash attention for prefill.
        Tiled: "tiled", "tiled", ["sm_75" ptx 65, "sm_80", "sm_90a"];
        /// The same with a bias or a mask.
        TiledMasked: "tiled_masked", "tiled-masked", ["sm_75" ptx 65, "sm_80"];
        /// The same over a paged KV cache.
        TiledPaged: "tiled_paged", "tiled-paged", ["sm_80"];
        /// `Tiled` with K and V by TMA.
        TiledTma: "tiled_tma", "tiled-tma", ["sm_90" ptx 80];
        /// The same in float32.
        TiledF32: "tiled_f32", "tiled-f32", ["sm_80"];
        /// The same for heads larger than 256.
        TiledWide: "tiled_wide", "tiled-wide", ["sm_80"];
    }
    hopper {
        /// Flash attention with warpgroups and TMA.
        Hopper: "hopper", "hopper", ["sm_90a"];
        /// The same with a bias or a mask.
        HopperMasked: "hopper_masked", "hopper-masked", ["sm_90a"];
        /// The same over a paged KV cache.
        HopperPaged: "hopper_paged", "hopper-paged", ["sm_90a"];
        /// The same over a quantized KV cache.
        HopperQuantized: "hopper_quantized", "hopper-quantized", ["sm_90a"];
        /// The same over a paged and quantized KV cache.
        HopperPagedQuantized: "hopper_paged_quantized", "hopper-paged-quantized", ["sm_90a"];
        /// The same with operands of e4m3.
        HopperFloat8: "hopper_float8", "hopper-float8", ["sm_90a"];
    }
    blackwell {
        // All GPUs of compute capabilities 10.x have tensor memory.
        /// Flash attention with tensor memory, for prefill.
        Blackwell: "blackwell", "blackwell", ["sm_100f" ptx 88];
        /// The same over a paged KV cache.
        BlackwellPaged: "blackwell_paged", "blackwell-paged", ["sm_100f" ptx 88];
    }
    latent {
        /// `Hopper` for heads of 512, over contiguous and paged KV caches.
        HopperWide: "hopper_wide", "hopper-wide", ["sm_90a"];
        /// Decode over a latent KV cache.
        Latent: "latent", "latent", ["sm_90a"];
        /// The same by `mma.sync`, and over a contiguous cache.
        LatentMma: "latent_mma", "latent-mma",
            ["sm_80", "sm_90" ptx 81, "sm_90a" ptx 81 => "latent-mma-warpgroup"];
    }
    split_kv {
        /// Tensor-core flash attention over a split of the keys, and the merge.
        SplitKv: "split_kv", "split-kv", ["sm_75" ptx 65, "sm_80", "sm_90a"];
        /// The same with a bias or a mask.
        SplitKvMasked: "split_kv_masked", "split-kv-masked", ["sm_75" ptx 65, "sm_80"];
    }
    decode {
        // Before SM 90 there are no clusters: a block is one, and splits of the keys meet in global
        // memory. `st.async` came after that target. Only some kernels of 64 rows have warpgroup
        // instructions, which no other architecture has.
        /// A whole decode step: rotation, append, attention by clusters of CTAs, merge.
        Decode: "decode", "decode",
            ["sm_80", "sm_90" ptx 81, "sm_90a" ptx 81 => "decode-warpgroup"];
    }
    decode_quantized {
        /// The same over a quantized KV cache.
        DecodeQuantized: "decode_quantized", "decode-quantized", ["sm_80" ptx 78, "sm_90" ptx 81];
    }
    blackwell_decode {
        /// Decode with tensor memory, behind a launch that rotates and appends.
        BlackwellDecode: "blackwell_decode", "blackwell-decode", ["sm_100f" ptx 88];
        /// The same over a paged KV cache.
        BlackwellDecodePaged: "blackwell_decode_paged", "blackwell-decode-paged",
            ["sm_100f" ptx 88];
    }
    peers {
        // From SM 90 on a grid may start before the one ahead has ended.
        /// The merge of what several GPUs hold shares of.
        Peers: "peers", "peers", ["sm_70", "sm_90" ptx 80];
    }
}
