//! A library for programs in other languages, as engines load it: it must leave the driver's names
//! alone.

use gqa_host::driver;

/// How many GPUs there are; negative where there is no usable driver.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_gpus() -> i64 {
    driver::device_count().map_or(-1, i64::from)
}
