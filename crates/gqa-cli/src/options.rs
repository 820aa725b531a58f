//! Options of the command line: the numbers that they take, and messages for wrong ones.

use std::error::Error;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::builder::{StringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// A whole number of that range.
pub fn whole<T>(range: RangeInclusive<T>) -> impl TypedValueParser<Value = T>
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    StringValueParser::new().try_map(move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("{} to {}", range.start(), range.end()))
    })
}

/// A whole number from 1 to `limit`.
pub fn count(limit: u64) -> impl TypedValueParser<Value = u64> {
    whole(1..=limit)
}

/// A number, which the operator checks.
pub fn number(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| "a number".to_owned())
}

/// A finite number, 0 or more. ONNX's operators take a negative softcap for none.
pub fn magnitude<T: FromStr + PartialOrd + Into<f64> + Copy>(text: &str) -> Result<T, String> {
    let is_one = |number: &T| (0.0..=f64::MAX).contains(&(*number).into());
    text.parse().ok().filter(is_one).ok_or_else(|| "a finite number, 0 or more".to_owned())
}

/// The command, whose options take a negative number for their value and not for an unknown option:
/// the error about it then names the option.
pub fn signed(command: clap::Command) -> clap::Command {
    let signed_value = |option: clap::Arg| match option.get_action().takes_values() {
        true if !option.is_positional() => option.allow_negative_numbers(true),
        _ => option,
    };
    command.mut_args(signed_value).mut_subcommands(signed)
}

/// A mistake in an option's value: the option, what was got and what is allowed.
pub fn wrong_value(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    };
    let allowed = error.source().filter(|_| error.kind() == ErrorKind::ValueValidation)?;
    let (option, got) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    let option = option.split(' ').next()?;
    Some(format!("{option}: got {got:?}; allowed: {allowed}"))
}
