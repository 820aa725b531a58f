//! Named ranges on the time line of NVIDIA's profilers (NVTX), with feature `nvtx`; without it,
//! nothing.

#[cfg(feature = "nvtx")]
pub(super) use nvtx::open;

/// A range that was never begun.
#[cfg(not(feature = "nvtx"))]
pub(super) struct Range;

/// Does nothing.
#[cfg(not(feature = "nvtx"))]
pub(super) fn open(_: &str) -> Range {
    Range
}

/// The protocol of NVTX 3 without its C headers. A profiler that starts a program names a library
/// in an environment variable. The program loads it and hands it a function that gives out tables
/// of pointers to function pointers, which the profiler then sets.
#[cfg(feature = "nvtx")]
mod nvtx {
    use libloading::Library;
    use std::ffi::{CString, c_char, c_int, c_uint, c_void};
    use std::ptr::null;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicPtr, Ordering};

    /// The slot for a function of the profiler; null if it sets none.
    type Slot = AtomicPtr<c_void>;

    /// Functions of a module: numbers 1 to 15.
    const FUNCTIONS: usize = 16;
    /// The NVTX modules CORE and CORE2. Profilers ask for both; only functions of CORE are called.
    const MODULES: [c_uint; 2] = [1, 5];
    const RANGE_PUSH_A: usize = 9;
    const RANGE_POP: usize = 11;

    static SLOTS: [[Slot; FUNCTIONS]; 2] =
        [const { [const { Slot::new(std::ptr::null_mut()) }; FUNCTIONS] }; 2];

    /// A module's table: null, pointers to its slots, null.
    struct Table([*const Slot; FUNCTIONS + 1]);

    // SAFETY: the pointers lead to atomics that live for ever.
    unsafe impl Send for Table {}
    // SAFETY: as above.
    unsafe impl Sync for Table {}

    #[repr(C)]
    struct Callbacks {
        size: usize,
        module_table: extern "C" fn(c_uint, *mut *const *const Slot, *mut c_uint) -> c_int,
    }

    #[repr(C)]
    struct VersionInfo {
        size: usize,
        version: u32,
        reserved: u32,
        set_injection_version: extern "C" fn(u32),
    }

    static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), module_table };
    static VERSION_INFO: VersionInfo = VersionInfo {
        size: size_of::<VersionInfo>(),
        version: 3,
        reserved: 0,
        set_injection_version,
    };

    extern "C" fn set_injection_version(_: u32) {}

    /// Returns a module's table and its length; 1 for a known module.
    extern "C" fn module_table(
        module: c_uint,
        table: *mut *const *const Slot,
        size: *mut c_uint,
    ) -> c_int {
        static TABLES: OnceLock<[Table; 2]> = OnceLock::new();
        let Some(number) = MODULES.iter().position(|&known| known == module) else { return 0 };
        let tables = TABLES.get_or_init(|| {
            SLOTS.each_ref().map(|slots| {
                let mut table = [null(); FUNCTIONS + 1];
                for (entry, slot) in table.iter_mut().zip(slots).skip(1) {
                    *entry = std::ptr::from_ref(slot);
                }
                Table(table)
            })
        });
        // SAFETY: the profiler passes places for both results, or null.
        unsafe {
            if let Some(size) = size.as_mut() {
                *size = FUNCTIONS as c_uint;
            }
            if let Some(table) = table.as_mut() {
                *table = tables[number].0.as_ptr();
            }
        }
        1
    }

    /// The entry point by which the profiler gets the tables: 1 for functions, 3 for versions.
    extern "C" fn export_table(id: u32) -> *const c_void {
        match id {
            1 => (&raw const CALLBACKS).cast(),
            3 => (&raw const VERSION_INFO).cast(),
            _ => null(),
        }
    }

    type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;

    /// Loads the profiler's library, if the program runs under one, once; it stays loaded.
    fn attach() {
        static PROFILER: OnceLock<Option<Library>> = OnceLock::new();
        PROFILER.get_or_init(|| {
            let path = std::env::var_os("NVTX_INJECTION64_PATH")?;
            // SAFETY: the profiler that started this program asks for its library to be loaded, and
            // to be initialised by that function.
            unsafe {
                let library = Library::new(path).ok()?;
                let initialize = *library.get::<Initialize>(b"InitializeInjectionNvtx2").ok()?;
                (initialize(export_table) != 0).then_some(library)
            }
        });
    }

    /// A range of this thread that ends when it is dropped.
    pub(crate) struct Range(());

    /// Begins a range.
    pub(crate) fn open(name: &str) -> Range {
        attach();
        push(name);
        Range(())
    }

    fn push(name: &str) {
        let push = SLOTS[0][RANGE_PUSH_A].load(Ordering::Acquire);
        if let (false, Ok(name)) = (push.is_null(), CString::new(name)) {
            // SAFETY: the profiler put its function of that number there.
            let push: unsafe extern "C" fn(*const c_char) -> c_int =
                unsafe { std::mem::transmute(push) };
            // SAFETY: the name ends with a NUL; the profiler copies it.
            unsafe { push(name.as_ptr()) };
        }
    }

    impl Drop for Range {
        fn drop(&mut self) {
            let pop = SLOTS[0][RANGE_POP].load(Ordering::Acquire);
            if !pop.is_null() {
                // SAFETY: the profiler put its function of that number there.
                let pop: unsafe extern "C" fn() -> c_int = unsafe { std::mem::transmute(pop) };
                // SAFETY: takes nothing.
                unsafe { pop() };
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::ffi::CStr;
        use std::sync::Mutex;

        static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

        extern "C" fn pushed(name: *const c_char) -> c_int {
            // SAFETY: a name that ends with a NUL.
            SEEN.lock()
                .unwrap()
                .push(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
            0
        }

        extern "C" fn popped() -> c_int {
            SEEN.lock().unwrap().push("end".to_owned());
            0
        }

        /// What a profiler does when it is initialised.
        fn inject(export_table: extern "C" fn(u32) -> *const c_void) {
            let (mut table, mut size) = (null(), 0);
            // SAFETY: the tables are laid out as NVTX has them.
            unsafe {
                let callbacks = &*export_table(1).cast::<Callbacks>();
                assert_eq!(callbacks.size, 16);
                assert_eq!((callbacks.module_table)(2, &raw mut table, &raw mut size), 0);
                assert_eq!((callbacks.module_table)(1, &raw mut table, &raw mut size), 1);
                assert_eq!(
                    (size, (*table).is_null(), (*table.add(16)).is_null()),
                    (16, true, true)
                );
                (**table.add(RANGE_PUSH_A)).store(pushed as *mut c_void, Ordering::Release);
                (**table.add(RANGE_POP)).store(popped as *mut c_void, Ordering::Release);
                assert_eq!((*export_table(3).cast::<VersionInfo>()).version, 3);
            }
            assert!(export_table(2).is_null());
        }

        #[test]
        fn a_profiler_that_attaches_sees_ranges_nested() {
            drop(open("unseen"));
            inject(export_table);
            {
                let _outer = open("call");
                let _inner = open("launch");
            }
            assert_eq!(*SEEN.lock().unwrap(), ["call", "launch", "end", "end"]);
        }
    }
}
