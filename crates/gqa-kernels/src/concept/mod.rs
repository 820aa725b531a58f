//! The semantics of attention, without hardware: lengths, masks, the online softmax, heads.

pub mod band;
pub mod heads;
pub mod mask;
pub mod pages;
pub mod scales;
pub mod seqlen;
pub mod sliding;
pub mod softmax;
