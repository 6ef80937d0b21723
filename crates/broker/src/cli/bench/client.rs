//! A keep-alive HTTP/1.1 connection that costs the load generator as little as it can.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// An answer later than this is a failure of the run.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
const HEAD_BYTES_MAX: usize = 16 * 1024;
const BODY_BYTES_MAX: usize = 256 * 1024 * 1024;

pub(super) struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
}

pub(super) struct Reply<'a> {
    pub(super) status: u16,
    pub(super) body: &'a [u8],
}

impl Reply<'_> {
    /// The start of the body, for an error message.
    pub(super) fn excerpt(&self) -> String {
        String::from_utf8_lossy(&self.body[..self.body.len().min(300)]).into_owned()
    }
}

/// A whole request, head and body.
pub(super) fn request(method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut bytes = format!(
        "{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

impl Connection {
    pub(super) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("no connection to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, input: Vec::with_capacity(64 * 1024) })
    }

    /// Sends a request made by [`request`] and reads the answer whole.
    pub(super) async fn send(&mut self, request: &[u8]) -> anyhow::Result<Reply<'_>> {
        timeout(ANSWER_WAIT, self.exchange(request)).await.context("no answer in time")?
    }

    async fn exchange(&mut self, request: &[u8]) -> anyhow::Result<Reply<'_>> {
        self.stream.write_all(request).await?;
        self.input.clear();
        let head_bytes = loop {
            if let Some(at) = self.input.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            ensure!(self.input.len() < HEAD_BYTES_MAX, "the head of an answer is too long");
            self.read_some().await?;
        };
        let (status, body_bytes) = read_head(&self.input[..head_bytes])?;
        ensure!(body_bytes <= BODY_BYTES_MAX, "an answer of {body_bytes} bytes");
        self.input.reserve((head_bytes + body_bytes).saturating_sub(self.input.len()));
        while self.input.len() < head_bytes + body_bytes {
            self.read_some().await?;
        }
        ensure!(self.input.len() == head_bytes + body_bytes, "bytes after the answer");
        Ok(Reply { status, body: &self.input[head_bytes..] })
    }

    async fn read_some(&mut self) -> anyhow::Result<()> {
        ensure!(self.stream.read_buf(&mut self.input).await? != 0, "the server closed the connection");
        Ok(())
    }
}

/// Status and length of the body. A body without a length is refused, not guessed at.
fn read_head(head: &[u8]) -> anyhow::Result<(u16, usize)> {
    let head = std::str::from_utf8(head).context("the head of an answer is not text")?;
    let mut lines = head.split("\r\n");
    let status: u16 = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .and_then(|status| status.parse().ok())
        .context("an answer without a status")?;
    let mut length = None;
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { continue };
        if name.eq_ignore_ascii_case("content-length") {
            length = Some(value.trim().parse().context("a content-length that is no number")?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            bail!("an answer in chunks, which this client does not read");
        }
    }
    match length {
        Some(length) => Ok((status, length)),
        None if status == 204 => Ok((status, 0)),
        None => bail!("an answer without a length"),
    }
}
