//! The handshake: protocol versions, and the proof that both ends know the same secret.
//!
//! Each end draws a random nonce. The client sends its proof first, and the server sends its own
//! only if the client's is correct, so a stranger gets nothing that helps to guess the secret. A
//! proof is HMAC-SHA-256, keyed with the secret, over the protocol, its version, the sender's role
//! and both nonces. So a recorded proof is useless on another connection, in the other direction,
//! and for another version. Before the client's proof, the server opens no file and grants no
//! memory to the client. The rest of the connection is neither encrypted nor authenticated: see
//! SECURITY.md.

use crate::protocol::{Message, Nonce, Proof, VERSION};
use crate::transport::{Link, expect_message, unexpected};
use hmac::{Hmac, KeyInit as _, Mac as _};
use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::fs::{FileType, Mode, OFlags};
use sha2::Sha256;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// Shortest secret, in bytes: a shorter one could be guessed from one recorded connection.
const MIN_SECRET: usize = 16;
/// Longest secret, in bytes.
const MAX_SECRET: usize = 4096;

/// A secret that both ends share.
pub(crate) struct Secret(Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The error if only the server has a secret, whichever end detects it.
const SECRET_REQUIRED: &str =
    "the server requires a secret: give the same secret with --secret-file";

/// The sender's role. The labels have equal length, so that different MAC inputs never collide.
#[derive(Debug, Clone, Copy)]
enum Role {
    Client,
    Server,
}

impl Role {
    const fn label(self) -> &'static [u8; 6] {
        match self {
            Self::Client => b"client",
            Self::Server => b"server",
        }
    }
}

impl Secret {
    /// Reads the secret: the contents of the file without the line break at the end.
    ///
    /// # Errors
    /// Fails if the file cannot be read, if other users can read or change it, or if the secret is
    /// too short or too long.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let refuse = |why: String| Error::failed(format!("'{}' {why}", path.display()));
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .context(format_args!("'{}'", path.display()))?;
        let stat = rustix::fs::fstat(&fd).context(format_args!("'{}'", path.display()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refuse("is not a regular file".into()));
        }
        // The group may read the file (0o440), because service managers pass credentials in that
        // way.
        if stat.st_mode & 0o027 != 0 {
            return Err(refuse(format!(
                "has the permissions {:03o}: other users can read it, or a group can change it; \
                 do `chmod 600` first",
                stat.st_mode & 0o777
            )));
        }
        if !is_trusted(stat.st_uid, rustix::process::geteuid().as_raw()) {
            return Err(refuse("belongs to another user, who can change it".into()));
        }
        let mut octets = Vec::new();
        File::from(fd)
            .take(MAX_SECRET as u64 + 3)
            .read_to_end(&mut octets)
            .context(format_args!("'{}'", path.display()))?;
        let end = octets.strip_suffix(b"\n").map_or(octets.len(), |line| {
            line.strip_suffix(b"\r").unwrap_or(line).len()
        });
        octets.truncate(end);
        if !(MIN_SECRET..=MAX_SECRET).contains(&octets.len()) {
            return Err(refuse(format!(
                "contains {} octets; a secret has {MIN_SECRET} to {MAX_SECRET}, for example from \
                 `head -c 32 /dev/urandom | base64`",
                octets.len()
            )));
        }
        Ok(Self(octets))
    }

    fn mac(&self, role: Role, client: &Nonce, server: &Nonce) -> Result<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).context("secret")?;
        mac.update(b"iwarp cp");
        mac.update(&VERSION.to_be_bytes());
        mac.update(role.label());
        mac.update(client);
        mac.update(server);
        Ok(mac)
    }

    fn prove(&self, role: Role, client: &Nonce, server: &Nonce) -> Result<Proof> {
        Ok(self
            .mac(role, client, server)?
            .finalize()
            .into_bytes()
            .into())
    }

    /// Verifies the peer's proof in constant time.
    fn verify(&self, role: Role, client: &Nonce, server: &Nonce, proof: &Proof) -> Result<()> {
        self.mac(role, client, server)?
            .verify_slice(proof)
            .map_err(|_| Error::failed("the peer has a different secret"))
    }
}

/// Returns `true` if a file that belongs to `owner` can be changed only by `user` and root.
const fn is_trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

fn new_nonce() -> Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).context("cannot get random numbers")?;
    Ok(nonce)
}

/// Performs the client's handshake.
///
/// # Errors
/// Fails if the versions differ, or if one end requires a proof that the other cannot give.
pub(crate) fn client_handshake(link: &mut impl Link, secret: Option<&Secret>) -> Result<()> {
    let client_nonce = new_nonce()?;
    link.send(&Message::Hello {
        version: VERSION,
        secret: secret.is_some(),
        nonce: client_nonce,
    })?;
    let server_nonce = match expect_message(link)? {
        Message::Hello {
            version,
            secret: required,
            nonce,
        } => {
            check_version(version)?;
            match (secret, required) {
                (None, true) => {
                    return Err(Error::failed(SECRET_REQUIRED));
                }
                (Some(_), false) => {
                    return Err(Error::failed(
                        "the server has no secret, so it cannot prove its identity: start it with \
                         --secret-file, or omit --secret-file for this copy",
                    ));
                }
                _ => nonce,
            }
        }
        other => return Err(unexpected(&other)),
    };
    let Some(secret) = secret else { return Ok(()) };
    link.send(&Message::Proof {
        proof: secret.prove(Role::Client, &client_nonce, &server_nonce)?,
    })?;
    match expect_message(link)? {
        Message::Proof { proof } => {
            secret.verify(Role::Server, &client_nonce, &server_nonce, &proof)
        }
        other => Err(unexpected(&other)),
    }
}

/// Performs the server's handshake. Returns `false` if the client closed the connection without
/// having sent a message.
pub(crate) fn server_handshake(link: &mut impl Link, secret: Option<&Secret>) -> Result<bool> {
    let Some(first) = link.recv()? else {
        return Ok(false);
    };
    let Message::Hello {
        version,
        secret: client_has_secret,
        nonce: client_nonce,
    } = first
    else {
        return Err(unexpected(&first));
    };
    let server_nonce = new_nonce()?;
    // Answer before the checks, so that the client can report both versions or the missing secret.
    link.send(&Message::Hello {
        version: VERSION,
        secret: secret.is_some(),
        nonce: server_nonce,
    })?;
    check_version(version)?;
    let Some(secret) = secret else {
        return Ok(true);
    };
    if !client_has_secret {
        return Err(Error::failed(SECRET_REQUIRED));
    }
    // Not `expect_message`: it skips `Working` messages, with which an unauthenticated client could
    // postpone the time-out.
    match link.recv()? {
        Some(Message::Proof { proof }) => {
            secret.verify(Role::Client, &client_nonce, &server_nonce, &proof)?;
        }
        Some(other) => return Err(unexpected(&other)),
        None => {
            return Err(Error::failed(
                "the client closed the connection instead of sending a proof",
            ));
        }
    }
    link.send(&Message::Proof {
        proof: secret.prove(Role::Server, &client_nonce, &server_nonce)?,
    })?;
    Ok(true)
}

fn check_version(peer_version: u16) -> Result<()> {
    if peer_version == VERSION {
        return Ok(());
    }
    Err(Error::failed(format!(
        "the peer uses version {peer_version} of the iwarp cp protocol, this command uses version \
         {VERSION}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::tests::TempDir;
    use std::os::unix::fs::PermissionsExt as _;

    fn read_secret(t: &TempDir, content: &[u8], mode: u32) -> Result<Secret> {
        let path = t.path("secret");
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        Secret::read(&path)
    }

    #[test]
    fn secret_length_is_checked() {
        let t = TempDir::new();
        let shortest = [b'x'; 16];
        assert_eq!(read_secret(&t, &shortest, 0o600).unwrap().0, shortest);
        // The line break at the end is not part of the secret.
        for end in [&b""[..], b"\n", b"\r\n"] {
            let content = [&[b'x'; 4096][..], end].concat();
            assert_eq!(read_secret(&t, &content, 0o600).unwrap().0, [b'x'; 4096]);
        }
        let with_cr = [&shortest[..], b"\r"].concat();
        assert_eq!(read_secret(&t, &with_cr, 0o600).unwrap().0, with_cr);
        for content in [
            &b""[..],
            b"\n",
            &shortest[1..],
            &[b'x'; 4097],
            &[b'x'; 9000],
        ] {
            let e = read_secret(&t, content, 0o600).unwrap_err().to_string();
            assert!(e.contains("octets"), "{e}");
        }
    }

    #[test]
    fn secret_file_is_checked() {
        let t = TempDir::new();
        let secret = [b'x'; 16];
        let line = [&secret[..], b"\r\n"].concat();
        assert_eq!(read_secret(&t, &line, 0o440).unwrap().0, secret);
        for mode in [0o604, 0o602, 0o601, 0o620] {
            let e = read_secret(&t, &secret, mode).unwrap_err().to_string();
            assert!(e.contains("chmod"), "{mode:o} {e}");
        }
        assert!(
            Secret::read(&t.path(""))
                .unwrap_err()
                .to_string()
                .contains("regular")
        );
        assert!(Secret::read(&t.path("nothing")).is_err());
        // A FIFO without a writer must not block.
        let (fifo, mode) = (t.path("fifo"), Mode::RUSR | Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0).unwrap();
        let e = Secret::read(&fifo).unwrap_err().to_string();
        assert!(e.contains("regular"), "{e}");
        assert_eq!(format!("{:?}", Secret(vec![1])), "Secret");
    }

    #[test]
    fn secret_of_another_user_is_refused() {
        for (owner, user, trusted) in [
            (0, 0, true),
            (0, 1000, true),
            (1000, 1000, true),
            (1000, 1001, false),
            (1000, 0, false),
        ] {
            assert_eq!(is_trusted(owner, user), trusted, "{owner} {user}");
        }
        // Only root can give a file to another user.
        let t = TempDir::new();
        std::fs::write(t.path("secret"), [b'x'; 16]).unwrap();
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(t.path("secret"), private).unwrap();
        if std::os::unix::fs::chown(t.path("secret"), Some(54_321), None).is_ok() {
            let e = Secret::read(&t.path("secret")).unwrap_err().to_string();
            assert!(e.contains("another user"), "{e}");
        }
    }

    /// Different builds must compute the same proof. The value was computed with Python's `hmac`
    /// and `hashlib`.
    #[test]
    fn proof_has_known_value() {
        let secret = Secret(b"correct horse battery staple".to_vec());
        let (client, server) = ([1; 32], [2; 32]);
        let proof = secret.prove(Role::Server, &client, &server).unwrap();
        let hex: String = proof.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "d816e0d3efd44695b3b457f817d6e3447a7d782391cd8c4b1b1fe974b513bfee"
        );
    }

    #[test]
    fn proof_is_bound_to_role_and_nonces() {
        let secret = Secret(vec![7; 16]);
        let (a, b) = ([1; 32], [2; 32]);
        let proof = secret.prove(Role::Client, &a, &b).unwrap();
        secret.verify(Role::Client, &a, &b, &proof).unwrap();
        assert!(secret.verify(Role::Server, &a, &b, &proof).is_err());
        assert!(secret.verify(Role::Client, &b, &a, &proof).is_err());
        assert!(secret.verify(Role::Client, &a, &[3; 32], &proof).is_err());
        assert!(
            Secret(vec![8; 16])
                .verify(Role::Client, &a, &b, &proof)
                .is_err()
        );
        let mut changed = proof;
        changed[31] ^= 1;
        assert!(secret.verify(Role::Client, &a, &b, &changed).is_err());
        assert_ne!(new_nonce().unwrap(), new_nonce().unwrap());
    }
}
