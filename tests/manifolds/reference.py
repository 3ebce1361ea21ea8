"""Independent routes: dense NumPy and SciPy in float64, written from the tables of the paper, not from the library."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

Array = NDArray[np.float64]


def _power(matrix: Array, exponent: float) -> Array:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.T


def geometric_mean(X: Array, Y: Array, p: float) -> Array:
    """``X #_p Y`` of two positive definite matrices."""
    root, inverse = _power(X, 0.5), _power(X, -0.5)
    return root @ _power(inverse @ Y @ inverse, p) @ root


def weights(G: Array, H: Array, p: float, relaxation: float = 0.0) -> tuple[Array, Array]:
    """Matrices of the metric on the two factors."""
    SG, SH = G.T @ G, H.T @ H
    if relaxation == 0:
        return geometric_mean(np.linalg.inv(SG), SH, p), geometric_mean(np.linalg.inv(SH), SG, p)
    values, vectors = scipy.linalg.eigh(SH, np.linalg.inv(SG))  # SH v = s^2 SG^-1 v, v^T SG^-1 v = 1
    s = np.sqrt(values)
    w = (s + relaxation * s.max()) ** (2 * p - 1)
    dual = np.linalg.inv(vectors).T  # = SG^-1 vectors
    return (dual * (s * w)) @ dual.T, (vectors * (w / s)) @ vectors.T


def inner(
    G: Array, H: Array, u: tuple[Array, Array], v: tuple[Array, Array], p: float, relaxation: float = 0.0
) -> float:
    """Inner product from the weights."""
    K, L = weights(G, H, p, relaxation)
    return float(np.trace(K @ u[0].T @ v[0]) + np.trace(L @ u[1].T @ v[1]))


def project_inv(G: Array, H: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Horizontal projection of inv through SciPy's Sylvester solver."""
    SG, SH = G.T @ G, H.T @ H
    A = SG @ SH
    X = scipy.linalg.solve_sylvester(A, A, SG @ H.T @ b - a.T @ G @ SH)
    return a + G @ X.T, b - H @ X


def project_dense(G: Array, H: Array, a: Array, b: Array, p: float, relaxation: float = 0.0) -> tuple[Array, Array]:
    """Horizontal projection by least squares against a basis of vertical vectors."""
    h = G.shape[1]
    K, L = weights(G, H, p, relaxation)
    root_k, root_l = np.linalg.cholesky(K), np.linalg.cholesky(L)
    columns = []
    for i in range(h):
        for j in range(h):
            E = np.zeros((h, h))
            E[i, j] = 1
            columns.append(np.concatenate([(-G @ E @ root_k).ravel(), (H @ E.T @ root_l).ravel()]))
    target = np.concatenate([(a @ root_k).ravel(), (b @ root_l).ravel()])
    field = np.linalg.lstsq(np.stack(columns, 1), target, rcond=None)[0].reshape(h, h)
    return a + G @ field, b - H @ field.T


def christoffel(G: Array, H: Array, a: Array, b: Array, metric: str) -> tuple[Array, Array]:
    """The two printed Christoffel terms."""
    SG, SH = G.T @ G, H.T @ H
    if metric == "mix":
        first = (a @ (b.T @ H + H.T @ b) - G @ b.T @ b) @ np.linalg.inv(SH)
        return first, (b @ (a.T @ G + G.T @ a) - H @ a.T @ a) @ np.linalg.inv(SG)

    def one(Y: Array, y: Array, S: Array) -> Array:
        inverse = np.linalg.inv(S)
        return -y @ inverse @ (y.T @ Y + Y.T @ y) + Y @ inverse @ y.T @ y

    return one(G, a, SG), one(H, b, SH)


def christoffel_by_differences(
    G: Array, H: Array, a: Array, b: Array, p: float, relaxation: float, step: float = 1e-6
) -> tuple[Array, Array]:
    """Christoffel term of any metric from central differences of the metric itself."""
    u = (a, b)

    def momentum(t: float) -> tuple[Array, Array]:
        K, L = weights(G + t * a, H + t * b, p, relaxation)
        return a @ K, b @ L

    ahead, behind = momentum(step), momentum(-step)
    pull: list[Array] = [np.zeros_like(G), np.zeros_like(H)]
    for side, base in enumerate((G, H)):
        for index in np.ndindex(base.shape):
            values = []
            for sign in (1, -1):
                point = [G.copy(), H.copy()]
                point[side][index] += sign * step
                values.append(inner(point[0], point[1], u, u, p, relaxation))
            pull[side][index] = (values[0] - values[1]) / (2 * step)
    K, L = weights(G, H, p, relaxation)
    first = ((ahead[0] - behind[0]) / (2 * step) - pull[0] / 2) @ np.linalg.inv(K)
    return first, ((ahead[1] - behind[1]) / (2 * step) - pull[1] / 2) @ np.linalg.inv(L)


def geodesic(G: Array, H: Array, a: Array, b: Array, metric: str) -> tuple[Array, Array]:
    """Solve the geodesic equation with DOP853."""
    sizes = np.cumsum([G.size, H.size, G.size])

    def rate(_: float, y: Array) -> Array:
        g, k, u, v = np.split(y, sizes)
        g, k, u, v = g.reshape(G.shape), k.reshape(H.shape), u.reshape(G.shape), v.reshape(H.shape)
        bend = christoffel(g, k, u, v, metric)
        return np.concatenate([u.ravel(), v.ravel(), -bend[0].ravel(), -bend[1].ravel()])

    start = np.concatenate([part.ravel() for part in (G, H, a, b)])
    end = solve_ivp(rate, (0, 1), start, method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    g, k, _, _ = np.split(end, sizes)
    return g.reshape(G.shape), k.reshape(H.shape)
