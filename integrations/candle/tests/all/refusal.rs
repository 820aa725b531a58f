//! What an error says.

use candle::{Error, Result};

/// The text of a refusal, without the trace that candle adds where `RUST_BACKTRACE` is set.
pub fn refusal<T>(result: Result<T>) -> String {
    match result.err().expect("refused") {
        Error::WithBacktrace { inner, .. } => inner.to_string(),
        error => error.to_string(),
    }
}

mod of_options {
    use crate::options::{Args, check_room, of_file};
    use clap::Parser;
    use std::path::Path;

    /// What is said of the program's options.
    fn said(options: &str) -> String {
        let words = ["smollm2"].into_iter().chain(options.split(' '));
        Args::try_parse_from(words).map(drop).expect_err("refused").to_string()
    }

    #[test]
    fn numbers_that_they_do_not_take_are_named_with_their_option() {
        for option in ["--tokens", "--context", "--repeat"] {
            for got in ["-3", "0", "1e30", "ten", "99999999999999999999999", "1048577"] {
                let text = said(&format!("{option} {got}"));
                let wanted = format!("invalid value '{got}' for '{option} <");
                assert!(text.contains(&wanted) && text.contains("allowed: 1 to 1048576"), "{text}");
            }
        }
        let text = said("--attention flash");
        assert!(text.contains("--attention") && text.contains("gqa-paged"), "{text}");
        for options in ["--chat", "--perplexity text", "--model x --perplexity y --context 9"] {
            assert!(said(options).contains("--perplexity") || said(options).contains("--chat"));
        }
    }

    #[test]
    fn files_are_named_with_their_option_and_path() {
        let path = Path::new("no/such/file");
        let text = of_file("--model", path, std::fs::read(path)).unwrap_err().to_string();
        assert!(text.starts_with("--model no/such/file: No such file"), "{text}");
        let traced = Err::<(), _>("unknown magic\n   0: bt");
        let text = of_file("--model", path, traced).unwrap_err().to_string();
        assert_eq!(text, "--model no/such/file: unknown magic");
    }

    #[test]
    fn a_model_has_room_for_so_many_tokens() {
        assert!(check_room("--tokens", 90, [10, 100]).is_ok());
        for got in [91, usize::MAX] {
            let text = check_room("--tokens", got, [10, 100]).unwrap_err().to_string();
            let wanted = "up to 90, as the model takes 100 with 10 more";
            assert_eq!(text, format!("--tokens: got {got}; allowed: {wanted}"));
        }
        assert!(check_room("--tokens", 1, [200, 100]).is_err());
    }
}
