//! One program, as linking candle takes long.

mod cache;
#[path = "../../examples/smollm2/clock.rs"]
#[expect(dead_code, reason = "the example says what attention takes")]
mod clock;
mod definition;
mod devices;
mod doors;
mod environment;
mod flash;
#[cfg(feature = "cuda")]
mod gpu;
mod latent;
#[path = "../../examples/smollm2/llama.rs"]
#[expect(dead_code, reason = "the example reads files, too")]
mod llama;
mod model;
#[path = "../../examples/smollm2/options.rs"]
mod options;
mod quantized;
mod refusal;
mod smollm2;
#[path = "../../examples/smollm2/text.rs"]
#[expect(dead_code, reason = "the example prints text as it comes")]
mod text;
#[path = "../../examples/smollm2/ways.rs"]
mod ways;
