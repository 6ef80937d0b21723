//! A small connection pooler: speaks the PostgreSQL protocol and lends its backends per transaction or per session.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_postgres::Config;
use tokio_postgres::config::Host;

/// For how long a client keeps a backend, and which idle one it gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lending {
    Session,
    TransactionNewest,
    TransactionOldest,
}

/// Runs until it is dropped.
pub(crate) struct Pooler {
    pub(crate) port: u16,
    accepting: AbortHandle,
}

struct Pool {
    lending: Lending,
    idle: Mutex<VecDeque<TcpStream>>,
}

const AUTHENTICATION_OK: &[u8] = b"R\0\0\0\x08\0\0\0\0";
const BACKEND_KEY: &[u8] = b"K\0\0\0\x0c\0\0\0\x01\0\0\0\x01";
const READY_IDLE: &[u8] = b"Z\0\0\0\x05I";

impl Pooler {
    /// A pooler in front of the server in `config`, with `backends` connections to it.
    pub(crate) async fn start(config: &Config, lending: Lending, backends: usize) -> Self {
        let mut idle = VecDeque::new();
        for _ in 0..backends {
            idle.push_back(log_in(config).await);
        }
        let pool = Arc::new(Pool { lending, idle: Mutex::new(idle) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let accepting = tokio::spawn(async move {
            let mut clients = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                clients.spawn(serve(client, Arc::clone(&pool)));
            }
        });
        Self { port, accepting: accepting.abort_handle() }
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Pool {
    /// None is a pool run dry, which no test of ours should need.
    fn take(&self) -> io::Result<TcpStream> {
        let mut idle = self.idle.lock().unwrap();
        let backend = match self.lending {
            Lending::TransactionOldest => idle.pop_front(),
            Lending::TransactionNewest | Lending::Session => idle.pop_back(),
        };
        backend.ok_or_else(|| io::Error::other("no idle backend"))
    }

    fn put(&self, backend: TcpStream) {
        self.idle.lock().unwrap().push_back(backend);
    }
}

/// Serves one client until it goes. A backend that it leaves in a transaction is closed, not lent again.
async fn serve(mut client: TcpStream, pool: Arc<Pool>) -> io::Result<()> {
    let length = client.read_u32().await?;
    client.read_exact(&mut vec![0; length as usize - 4]).await?;
    let greeting = [AUTHENTICATION_OK, BACKEND_KEY, READY_IDLE].concat();
    client.write_all(&greeting).await?;

    let mut lent = None;
    loop {
        let (kind, message) = read_message(&mut client).await?;
        if kind == b'X' {
            return Ok(());
        }
        let mut backend = match lent.take() {
            Some(backend) => backend,
            None => pool.take()?,
        };
        backend.write_all(&message).await?;
        // A query or a sync is answered up to "ready"; what precedes a sync is only passed on.
        let is_idle = matches!(kind, b'Q' | b'S') && relay_answer(&mut backend, &mut client).await?;
        if is_idle && pool.lending != Lending::Session {
            pool.put(backend);
        } else {
            lent = Some(backend);
        }
    }
}

/// Passes an answer on, and says whether the backend ended outside a transaction.
async fn relay_answer(backend: &mut TcpStream, client: &mut TcpStream) -> io::Result<bool> {
    loop {
        let (kind, message) = read_message(backend).await?;
        client.write_all(&message).await?;
        if kind == b'Z' {
            return Ok(message.last() == Some(&b'I'));
        }
    }
}

/// One message: its type, and all of its bytes.
async fn read_message(from: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut message = vec![0; 5];
    from.read_exact(&mut message).await?;
    let length = u32::from_be_bytes(message[1..5].try_into().unwrap()) as usize;
    message.resize(1 + length, 0);
    from.read_exact(&mut message[5..]).await?;
    Ok((message[0], message))
}

/// Opens a backend of the pooler's own; the server must trust local users.
async fn log_in(config: &Config) -> TcpStream {
    let [Host::Tcp(host), ..] = config.get_hosts() else {
        panic!("TEST_DATABASE_URL must name a TCP host");
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let mut backend = TcpStream::connect((host.as_str(), port)).await.unwrap();
    let user = config.get_user().expect("TEST_DATABASE_URL names a user");
    let database = config.get_dbname().unwrap_or(user);
    let mut startup = vec![0, 3, 0, 0];
    for word in ["user", user, "database", database, ""] {
        startup.extend_from_slice(word.as_bytes());
        startup.push(0);
    }
    let length = startup.len() as u32 + 4;
    backend.write_all(&length.to_be_bytes()).await.unwrap();
    backend.write_all(&startup).await.unwrap();
    loop {
        let (kind, message) = read_message(&mut backend).await.unwrap();
        match kind {
            b'R' => assert_eq!(message, AUTHENTICATION_OK, "the server must trust its users"),
            b'E' => panic!("{}", String::from_utf8_lossy(&message)),
            b'Z' => return backend,
            _ => {}
        }
    }
}
