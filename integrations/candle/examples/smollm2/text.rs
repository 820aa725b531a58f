//! Text to tokens and back.

use candle::quantized::gguf_file::Content;
use candle::quantized::tokenizer::TokenizerFromGguf;
use candle::{Error, Result};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence};

/// A tokenizer, and what ends a text.
pub struct Text {
    tokenizer: Tokenizer,
    end: u32,
}

impl Text {
    /// Of a GGUF file whose header is `file`.
    pub fn of(file: &Content) -> Result<Self> {
        let mut tokenizer = Tokenizer::from_gguf(file)?;
        // SmolLM2's digits are tokens of their own, and it puts no space before a text.
        let bytes = ByteLevel::default().add_prefix_space(false);
        let parts = vec![Digits::new(true).into(), bytes.into()];
        tokenizer.with_pre_tokenizer(Some(Sequence::new(parts)));
        let end = match file.metadata.get("tokenizer.ggml.eos_token_id") {
            Some(token) => token.to_u32()?,
            None => candle::bail!("the file does not say which token ends a text"),
        };
        Ok(Self { tokenizer, end })
    }

    /// Whether the token ends a text.
    pub fn is_end(&self, token: u32) -> bool {
        token == self.end
    }

    /// The tokens of a text.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, false).map_err(Error::wrap)?.get_ids().to_vec())
    }

    /// The text of tokens.
    pub fn text(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(Error::wrap)
    }
}

/// A question as SmolLM2-Instruct is asked it.
pub fn asked(question: &str) -> String {
    let system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
    let turn = |who, text| format!("<|im_start|>{who}\n{text}<|im_end|>\n");
    format!("{}{}<|im_start|>assistant\n", turn("system", system), turn("user", question))
}

/// Text that comes token by token: what is printed is what can no longer change.
#[derive(Default)]
pub struct Stream {
    tokens: Vec<u32>,
    shown: usize,
}

impl Stream {
    /// What one more token adds. A character may consist of several.
    pub fn add(&mut self, text: &Text, token: u32) -> Result<String> {
        self.tokens.push(token);
        let all = text.text(&self.tokens)?;
        if all.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let added = all.get(self.shown..).unwrap_or_default().to_owned();
        self.shown = all.len();
        Ok(added)
    }
}
