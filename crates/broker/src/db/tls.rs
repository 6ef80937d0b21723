//! TLS to PostgreSQL: which certificates are believed.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::error::Error;

/// Whose certificates are believed. Whether TLS is used at all is `sslmode` in the connection's config.
#[derive(Clone)]
pub struct TlsSettings(Arc<ClientConfig>);

impl TlsSettings {
    /// Believes the system's roots, or only `root_cert` (a PEM file) if one is given. With
    /// `reject_unauthorized` false it believes any certificate: encrypted, but not authenticated.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the PEM file cannot be read or holds no certificate.
    pub fn new(reject_unauthorized: bool, root_cert: Option<&PathBuf>) -> Result<Self, Error> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("ring supports the default versions");
        let config = if reject_unauthorized {
            builder.with_root_certificates(roots(root_cert)?).with_no_client_auth()
        } else {
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
                .with_no_client_auth()
        };
        Ok(Self(Arc::new(config)))
    }

    /// For a database reached over a Unix socket or without TLS: no root is loaded or believed.
    pub fn unused() -> Self {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring supports the default versions")
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        Self(Arc::new(config))
    }

    pub(super) fn client_config(&self) -> ClientConfig {
        (*self.0).clone()
    }
}

fn roots(root_cert: Option<&PathBuf>) -> Result<RootCertStore, Error> {
    let mut store = RootCertStore::empty();
    let Some(path) = root_cert else {
        store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(store);
    };
    let invalid = |reason: String| Error::invalid("PG_SSL_ROOT_CERT", format!("{}: {reason}", path.display()));
    for cert in CertificateDer::pem_file_iter(path).map_err(|e| invalid(e.to_string()))? {
        let cert = cert.map_err(|e| invalid(e.to_string()))?;
        store.add(cert).map_err(|e| invalid(e.to_string()))?;
    }
    if store.is_empty() {
        return Err(invalid("holds no certificate".to_owned()));
    }
    Ok(store)
}

/// Believes every certificate, as `PG_SSL_REJECT_UNAUTHORIZED=false` asks.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self, _: &CertificateDer<'_>, _: &[CertificateDer<'_>], _: &ServerName<'_>, _: &[u8], _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self, message: &[u8], cert: &CertificateDer<'_>, dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self, message: &[u8], cert: &CertificateDer<'_>, dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
