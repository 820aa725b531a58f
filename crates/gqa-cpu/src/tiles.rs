//! When a thread's AMX tile registers are configured.
//!
//! A product needs tiles of one shape, but the configuration belongs to the thread, and the ABI
//! lets any called function change it. Between two products, callbacks of the rows run, which may
//! compute attention themselves or use tiles for something else. So every product checks the
//! configuration first, which takes as long as a product of two tiles, and reloads it where it was
//! changed.

use super::lanes::Lanes;
use super::pairs::{Mode, Pairs};
use pulp::Simd;
use std::marker::PhantomData;

/// The memory layout that `ldtilecfg` reads and `sttilecfg` writes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shapes(pub(super) [u8; 64]);

impl Shapes {
    /// Eight tiles of 16 rows of 64 bytes.
    pub(super) const PRODUCT: Self = {
        const PALETTE: usize = 0;
        const BYTES_OF_A_ROW: usize = 16;
        const ROWS: usize = 48;
        let mut shapes = [0; 64];
        shapes[PALETTE] = 1;
        let mut tile = 0;
        while tile < 8 {
            // Of two bytes, the lower one first.
            shapes[BYTES_OF_A_ROW + 2 * tile] = 64;
            shapes[ROWS + tile] = 16;
            tile += 1;
        }
        Self(shapes)
    };
}

/// The tile registers of the calling thread: the processor's, or a test's model.
pub(super) trait Registers: Copy {
    /// The current configuration; zeros if there is none.
    fn shapes(self) -> Shapes;

    fn configure(self, shapes: &Shapes);

    /// Releases the tiles, so that the system does not save their contents.
    fn release(self);
}

/// Products of pairs in tiles.
pub(super) trait Multiply<S: Simd, const N: usize>: Registers {
    /// As [`Pairs::pair`].
    fn pair(self, simd: S, first: S::f32s, second: S::f32s) -> S::f32s;

    /// As [`Pairs::multiply`].
    ///
    /// # Safety
    ///
    /// The thread's registers have [`Shapes::PRODUCT`].
    unsafe fn multiply(
        self,
        simd: S,
        factors: &[u32],
        stride: usize,
        by: &[Lanes<S, N>],
        mode: Mode,
        to: &mut [Lanes<S, N>],
    );
}

/// Products in the tiles of a thread, which are released when it is dropped.
pub(super) struct Tiles<R: Registers> {
    registers: R,
    /// Of this thread only.
    _thread: PhantomData<*const ()>,
}

impl<R: Registers> Tiles<R> {
    pub(super) fn new(registers: R) -> Self {
        Self { registers, _thread: PhantomData }
    }
}

impl<R: Registers> Drop for Tiles<R> {
    fn drop(&mut self) {
        self.registers.release();
    }
}

impl<S: Simd, const N: usize, R: Multiply<S, N>> Pairs<S, N> for &Tiles<R> {
    #[inline(always)]
    fn pair(self, simd: S, first: S::f32s, second: S::f32s) -> S::f32s {
        self.registers.pair(simd, first, second)
    }

    #[inline(always)]
    fn multiply(
        self,
        simd: S,
        factors: &[u32],
        stride: usize,
        by: &[Lanes<S, N>],
        mode: Mode,
        to: &mut [Lanes<S, N>],
    ) {
        if self.registers.shapes() != Shapes::PRODUCT {
            self.registers.configure(&Shapes::PRODUCT);
        }
        // SAFETY: the shapes were just set, and no callback runs until the product is done
        unsafe { self.registers.multiply(simd, factors, stride, by, mode, to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instructions::Instructions;
    use crate::key_range::Attend;
    use crate::made_up::MadeUp;
    use crate::pairs::InPairs;
    use crate::pairs::tests::Plain;
    use crate::panels::many;
    use pulp::{Arch, WithSimd};
    use std::cell::Cell;

    const NONE: Shapes = Shapes([0; 64]);

    thread_local! {
        static SHAPES: Cell<Shapes> = const { Cell::new(NONE) };
        static LOADS: Cell<usize> = const { Cell::new(0) };
    }

    /// A model of tile registers that only tracks their configuration, for any processor.
    #[derive(Clone, Copy)]
    struct Model;

    impl Registers for Model {
        fn shapes(self) -> Shapes {
            SHAPES.get()
        }

        fn configure(self, shapes: &Shapes) {
            LOADS.set(LOADS.get() + 1);
            SHAPES.set(*shapes);
        }

        fn release(self) {
            SHAPES.set(NONE);
        }
    }

    impl<S: Simd, const N: usize> Multiply<S, N> for Model {
        fn pair(self, simd: S, first: S::f32s, second: S::f32s) -> S::f32s {
            <Plain as Pairs<S, N>>::pair(Plain, simd, first, second)
        }

        unsafe fn multiply(
            self,
            simd: S,
            factors: &[u32],
            stride: usize,
            by: &[Lanes<S, N>],
            mode: Mode,
            to: &mut [Lanes<S, N>],
        ) {
            assert_eq!(SHAPES.get(), Shapes::PRODUCT, "a processor would stop the program here");
            Plain.multiply(simd, factors, stride, by, mode, to);
        }
    }

    struct InModel<'a>(Attend<'a>);

    impl WithSimd for InModel<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let tiles = Tiles::new(Model);
            let products = InPairs { scale: self.0.rows.scale(), pairs: &tiles };
            many::<S, _, 2>(simd, products, self.0);
        }
    }

    /// Attention with modelled tiles; counts their configurations.
    fn attend(rows: &MadeUp) -> usize {
        let before = LOADS.get();
        let arch = Instructions::all()[0].vectors;
        if matches!(arch, Arch::Scalar) {
            return 0;
        }
        let (mut got, keys) = (Vec::new(), 0..rows.keys);
        let mut write = |_, softmax, output: &[f32]| {
            (rows.meanwhile)();
            got.push((softmax, output.to_vec()));
        };
        crate::native::dispatch(arch, InModel(Attend { rows, keys, write: &mut write }));
        rows.check(&got, 1.0 / 128.0, "tiles");
        LOADS.get() - before
    }

    fn rows(meanwhile: fn()) -> MadeUp {
        let rows = MadeUp::new(40, 300, [32, 64]);
        MadeUp { stored: true, has_bias: true, meanwhile, ..rows }
    }

    #[test]
    fn rows_may_ask_for_attention_in_tiles() {
        attend(&rows(|| {
            attend(&MadeUp { stored: true, ..MadeUp::new(10, 40, [32, 32]) });
        }));
        assert_eq!(SHAPES.get(), NONE, "released at the end");
    }

    #[test]
    fn rows_may_use_tiles_for_something_else() {
        attend(&rows(|| SHAPES.set(Shapes([1; 64]))));
    }

    #[test]
    fn tiles_that_nobody_uses_meanwhile_are_configured_once() {
        assert!(attend(&rows(|| ())) <= 1);
    }
}
