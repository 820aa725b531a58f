//! Work before attention: unpack, rotate, append.
