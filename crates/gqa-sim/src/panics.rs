//! Panics of kernels become faults and print nothing.

use crate::block::is_inside_kernel;
use std::any::Any;
use std::cell::RefCell;
use std::panic::{PanicHookInfo, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Puts a hook before the process's own that keeps the message of a panic inside a kernel and
/// passes on every other panic.
pub(crate) fn install_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(
            move |info| if is_inside_kernel() { keep(info) } else { previous(info) },
        ));
    });
}

fn keep(info: &PanicHookInfo<'_>) {
    let what = info.payload_as_str().unwrap_or("a value that is not a message");
    let place = info.location().map(|place| format!(" ({place})")).unwrap_or_default();
    MESSAGE.set(Some(format!("{what}{place}")));
}

/// The message of the panic that brought `payload`.
pub(crate) fn take_message(payload: Box<dyn Any + Send>) -> String {
    drop(payload);
    MESSAGE.take().unwrap_or_else(|| "without a message".to_owned())
}
