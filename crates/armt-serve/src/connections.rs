//! Connections: how many there are at a time, and how long one may be of no use to anybody.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Sleep;

use crate::app::App;
use crate::routes;

/// Takes connections until it is told to end, and then waits for those that there are. One without the whole head of a request for too long
/// is closed, so that nobody can hold them all.
pub async fn accept(listener: TcpListener, app: Arc<App>, mut told: oneshot::Receiver<()>) {
    let router = routes::router(app.clone());
    let (room, graceful) =
        (Arc::new(Semaphore::new(app.limits.connections.clamp(1, Semaphore::MAX_PERMITS))), GracefulShutdown::new());
    loop {
        let next = async {
            let place = room.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, stream) = tokio::select! {
            next = next => next,
            _ = &mut told => break,
        };
        let stream = match stream {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Too many open files, say: there are fewer later.
                tracing::warn!("a connection was not taken: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // An answer is not to wait for its last byte's company.
        let _ = stream.set_nodelay(true);
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(app.limits.silence);
        let connection =
            http.serve_connection(TokioIo::new(Patient::new(stream, app.limits.silence)), TowerToHyperService::new(router.clone()));
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // How it went is its client's matter.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// A connection that ends where its client takes nothing of what is written to it for too long.
struct Patient {
    stream: TcpStream,
    most: Duration,
    /// The end of its time, while something waits to be taken.
    late: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: TcpStream, most: Duration) -> Self {
        Patient { stream, most, late: None }
    }

    /// What came of writing, or that it has waited for too long.
    fn in_time(&mut self, context: &mut Context<'_>, written: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if written.is_ready() {
            self.late = None;
            return written;
        }
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.most)));
        late.as_mut().poll(context).map(|()| Err(Error::from(ErrorKind::TimedOut)))
    }
}

impl AsyncRead for Patient {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(context, written)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.in_time(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
