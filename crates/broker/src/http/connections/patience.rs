//! A stream that gives up on a client which takes nothing of what is written to it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Reads as the stream does. A write that makes no progress for a while fails, and with it the connection: whatever the
/// rest of the answer holds is let go.
pub(super) struct Patient<S> {
    stream: S,
    pause_max: Duration,
    /// Runs while a write waits for the client.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(super) fn new(stream: S, pause_max: Duration) -> Self {
        Self { stream, pause_max, waiting: None }
    }

    /// Passes on what a write came to, unless it waits for too long already.
    fn judge<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let pause_max = self.pause_max;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + pause_max)));
        ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing of the answer")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, closed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const PAUSE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_given_up() {
        let (server, mut client) = duplex(10);
        let mut server = Patient::new(server, PAUSE);
        let started = Instant::now();
        let error = server.write_all(&[7; 100]).await.expect_err("nobody reads");
        assert_eq!((error.kind(), started.elapsed()), (io::ErrorKind::TimedOut, PAUSE));
        drop(server);
        let mut taken = Vec::new();
        client.read_to_end(&mut taken).await.expect("it was closed");
        assert_eq!(taken, [7; 10]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_a_little_now_and_then_gets_all() {
        let (server, mut client) = duplex(10);
        let mut server = Patient::new(server, PAUSE);
        let reading = tokio::spawn(async move {
            let (mut taken, mut part) = (0, [0; 10]);
            while taken < 100 {
                sleep_until(Instant::now() + PAUSE / 2).await;
                taken += client.read(&mut part).await.expect("it goes on");
            }
            taken
        });
        let started = Instant::now();
        server.write_all(&[7; 100]).await.expect("it is taken");
        assert!(PAUSE < started.elapsed(), "in all it took longer than one pause may");
        assert_eq!(reading.await.expect("no panic"), 100);
    }
}
